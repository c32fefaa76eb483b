"""The initialization and finalization of MPI in this process.

The user may import mpi4py and start MPI before `init`, or never.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.meeting.launch import WorldRank
from hvdlite.common.runtime.start_watch import StartWatch
from hvdlite.common.settings.config import Config

log = logging.getLogger("hvdlite")

_attributes: list[int] = []  # the key of the attribute of COMM_SELF, once it is set
_failed = False  # a job of this process has failed: see `skip_mpi_finalize`


def mpi_runs() -> bool:
    """Return whether MPI has been started in this process, and not ended; does not import it."""
    if "mpi4py.MPI" not in sys.modules:
        return False
    from mpi4py import MPI

    return bool(MPI.Is_initialized() and not MPI.Is_finalized())


def running_world() -> WorldRank | None:
    """Return this process's place in MPI's world, if MPI runs in it."""
    if not mpi_runs():
        return None
    from mpi4py import MPI

    return WorldRank(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)


def start_mpi(config: Config, watch: StartWatch) -> Any:
    """Return the module ``mpi4py.MPI`` with MPI started: here, unless that was done before.

    Blocks until all ranks of the job have started MPI. Raises `HorovodInternalError` where MPI was
    ended, as it cannot be started a second time.
    """
    MPI = _import_mpi()  # noqa: N806 - as mpi4py's users call it
    if MPI.Is_finalized():
        raise HorovodInternalError(
            "MPI was ended in this process (MPI.Finalize), and cannot be started again: call "
            "hvdlite's shutdown() first, and MPI.Finalize at the end of the script, or never"
        )
    if not MPI.Is_initialized():
        with watch.mpi_blocks():
            _initialize(MPI, config)
        atexit.register(_finalize_mpi, os.getpid())
    elif MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        log.warning(
            "MPI was started before init() with a thread level below THREAD_SERIALIZED, and "
            "hvdlite calls it in a thread of its own: ask for THREAD_MULTIPLE, which is mpi4py's "
            "default"
        )
    return MPI


def _import_mpi() -> Any:
    """Import ``mpi4py.MPI`` so that it does not start MPI, where nobody has imported it before.

    mpi4py would do so with the interpreter locked, so that no thread could say who is missing; and
    it would end MPI even after a failure, and wait for ranks that are dead.
    """
    import mpi4py

    before = mpi4py.rc.initialize, mpi4py.rc.finalize
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = before
    return MPI


def _initialize(MPI: Any, config: Config) -> None:  # noqa: N803
    """Do what mpi4py does when it starts MPI, with the interpreter unlocked meanwhile."""
    import mpi4py

    names = {"single": 0, "funneled": 0, "serialized": MPI.THREAD_SERIALIZED}
    level = MPI.THREAD_MULTIPLE if mpi4py.rc.threads else MPI.THREAD_SINGLE
    level = min(level, names.get(mpi4py.rc.thread_level, MPI.THREAD_MULTIPLE))
    if config.mpi_threads_disable or level < MPI.THREAD_SERIALIZED:
        level = MPI.THREAD_SERIALIZED
    try:
        init_thread = ctypes.CDLL(MPI.__file__).MPI_Init_thread
    except (OSError, AttributeError):  # the library is inside mpi4py's own
        MPI.Init_thread(level)
        return
    if init_thread(None, None, int(level), ctypes.byref(ctypes.c_int())):
        raise HorovodInternalError("MPI could not be started (MPI_Init_thread failed)")
    if mpi4py.rc.errors == "exception":
        for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
            comm.Set_errhandler(MPI.ERRORS_RETURN)


def members_of_communicator(comm: Any, everyone: Any) -> list[int]:
    """Return the ranks of `comm` in the group `everyone`, ascending; a stranger is negative."""
    group = comm.Get_group()
    try:
        return sorted(group.Translate_ranks(list(range(group.Get_size())), everyone))
    finally:
        group.Free()


def call_before_mpi_ends(function: Callable[[], None]) -> None:
    """Have `function` called first when MPI ends, whoever ends it; the first call of this counts.

    MPI deletes the attributes of COMM_SELF before it ends. An engine that is still at work then
    would use MPI during its end, and both would wait for ever.
    """
    from mpi4py import MPI

    if not _attributes:
        _attributes.append(MPI.Comm.Create_keyval(delete_fn=lambda *_: function()))
        MPI.COMM_SELF.Set_attr(_attributes[0], True)


def skip_mpi_finalize() -> None:
    """Note that a job has failed: this process must not wait for ranks that are dead."""
    global _failed  # noqa: PLW0603
    _failed = True


def allow_mpi_finalize() -> None:
    """Note that all ranks of MPI have met again, after whatever had failed."""
    global _failed  # noqa: PLW0603
    _failed = False


def _finalize_mpi(process: int) -> None:
    """End MPI where this process has started it, but not after a failure: it waits for all ranks.

    A forked child of `process` is no rank.
    """
    from mpi4py import MPI

    if not _failed and os.getpid() == process and not MPI.Is_finalized():
        MPI.Finalize()
