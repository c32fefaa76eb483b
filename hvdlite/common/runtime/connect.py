"""Who takes part in a job: by the launcher's environment, a list of ranks, or a communicator."""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
from typing import Any, NamedTuple

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.plain.config import Config
from hvdlite.common.runtime.process_sets import is_communicator
from hvdlite.common.transport.base import Transport
from hvdlite.common.transport.inprocess import solo

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")


class Job(NamedTuple):
    """The connections of this rank, and the ranks as MPI knows them (None without MPI)."""

    transport: Transport
    mpi_group: Any = None


def connect(comm: Any, config: Config) -> Job:
    """Connect this rank with the others; blocks until they have come.

    Raises `ValueError` for a `comm` that is none, and as `transport.mpi.connect` does.
    """
    if is_communicator(comm):
        return _connect_mpi(comm, config)
    if comm is not None and not isinstance(comm, (list, tuple, range)):
        raise ValueError(
            f"Invalid type of argument comm: {type(comm).__name__} {comm!r}; "
            "give None, a list of world ranks, or an mpi4py communicator"
        )
    if comm:
        return _connect_ranks(list(comm), config)
    if _under_mpi():
        return _connect_mpi(_world(config), config)
    return Job(solo())


def _connect_ranks(ranks: list[int], config: Config) -> Job:
    if not _under_mpi():
        if ranks != [0]:
            raise ValueError(f"comm={ranks}: this job has rank 0 only; start it with hvdlite-run")
        return connect(None, config)
    world = _world(config)
    foreign = [rank for rank in ranks if not isinstance(rank, int) or not 0 <= rank < world.size]
    if foreign:
        raise ValueError(f"comm={ranks}: there is no rank {foreign[0]} in a job of {world.size}")
    if world.rank not in ranks:
        raise ValueError(f"comm={ranks} leaves out rank {world.rank}, which must not call init")
    sub = world.Create_group(world.group.Incl(ranks))
    try:
        return _connect_mpi(sub, config)
    finally:
        sub.Free()


def _connect_mpi(comm: Any, config: Config) -> Job:
    from hvdlite.common.transport import mpi

    try:
        return Job(mpi.connect(comm, config), comm.Get_group())
    except BaseException:
        leave_mpi_alone()
        raise


def _under_mpi() -> bool:
    """Whether a launcher has started this process as a rank, or the user's code uses MPI."""
    return "mpi4py.MPI" in sys.modules or any(name in os.environ for name in _LAUNCHED)


def _world(config: Config) -> Any:
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        if config.mpi_threads_disable:
            mpi4py.rc.thread_level = "serialized"
        mpi4py.rc.finalize = False
        atexit.register(_finalize_mpi, os.getpid())
        _start_mpi_with_all_ranks(config.start_timeout_seconds)
    from mpi4py import MPI

    _check_launcher(MPI.COMM_WORLD.size, MPI.Get_library_version())
    return MPI.COMM_WORLD


def _start_mpi_with_all_ranks(timeout_seconds: float) -> None:
    """MPI starts on all ranks together, and waits without end for one that never comes.

    It does so with the interpreter locked, so only a watchdog that needs no interpreter can end
    the process: its traceback shows the name of this function.
    """
    output = sys.__stderr__
    if output is not None:
        faulthandler.dump_traceback_later(timeout_seconds, exit=True, file=output)
    try:
        from mpi4py import MPI  # noqa: F401
    finally:
        faulthandler.cancel_dump_traceback_later()


def _check_launcher(size: int, library: str) -> None:
    """Raise `HorovodInternalError` when another MPI has started this process than it has loaded."""
    for name in _SIZES:
        told = os.environ.get(name, "")
        if told.isdigit() and int(told) > 1 and size == 1:
            raise HorovodInternalError(
                f"the launcher has started {told} ranks ({name}), but the MPI library that mpi4py "
                f"has loaded knows of this one only: it is {library.split(',', maxsplit=1)[0]!r}. "
                "Start the job with the mpirun of that library, or with hvdlite-run"
            )


_failed = False


def leave_mpi_alone() -> None:
    """The job has failed: this process must not wait for ranks that are dead."""
    global _failed  # noqa: PLW0603
    _failed = True


def _finalize_mpi(process: int) -> None:
    """What mpi4py would do, but not after a failure: MPI_Finalize waits for ranks that are dead.

    A forked child of `process` is no rank.
    """
    from mpi4py import MPI

    if not _failed and os.getpid() == process:
        MPI.Finalize()
