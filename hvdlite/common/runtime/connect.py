"""Connect the ranks of a job: those of the launcher, of a list, or of a communicator."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.plain.config import Config
from hvdlite.common.runtime.launched_rank import SIZES, launched_rank, was_launched
from hvdlite.common.runtime.mpi_process import (
    allow_mpi_finalize,
    members_of_communicator,
    mpi_runs,
    skip_mpi_finalize,
    start_mpi,
)
from hvdlite.common.runtime.process_sets import is_communicator
from hvdlite.common.runtime.start_watch import StartWatch
from hvdlite.common.transport.base import Transport
from hvdlite.common.transport.inprocess import solo


class Membership(NamedTuple):
    """The connections of this rank, and the ranks as MPI knows them (None without MPI)."""

    transport: Transport
    mpi_group: Any = None


def connect(comm: Any, config: Config) -> Membership:
    """Connect this rank with the others; blocks until all have connected.

    `comm` is None for all ranks of the job, a list of world ranks, or an mpi4py communicator.
    Raises `ValueError` for anything else, and as `transport.mpi.connect` does.
    """
    communicator = is_communicator(comm)
    if not communicator and comm is not None and not isinstance(comm, (list, tuple, range)):
        raise ValueError(
            f"Invalid type of argument comm: {type(comm).__name__} {comm!r}; "
            "give None, a list of world ranks, or an mpi4py communicator"
        )
    if not communicator and not was_launched() and not mpi_runs():
        if comm and list(comm) != [0]:
            raise ValueError(f"comm={comm}: this job has rank 0 only; start it with hvdlite-run")
        return Membership(solo())
    with StartWatch(launched_rank(), config.start_timeout_seconds) as watch:
        mpi = start_mpi(config, watch)
        if communicator:
            return _connect_mpi(mpi, comm, config, watch)
        _check_launcher(mpi.COMM_WORLD.size, mpi.Get_library_version())
        if comm:
            return _connect_ranks(mpi, list(comm), config, watch)
        return _connect_mpi(mpi, mpi.COMM_WORLD, config, watch)


def _connect_ranks(mpi: Any, ranks: list[int], config: Config, watch: StartWatch) -> Membership:
    world = mpi.COMM_WORLD
    foreign = [rank for rank in ranks if not isinstance(rank, int) or not 0 <= rank < world.size]
    if foreign:
        raise ValueError(f"comm={ranks}: there is no rank {foreign[0]} in a job of {world.size}")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"comm={ranks} names a rank twice")
    if world.rank not in ranks:
        raise ValueError(f"comm={ranks} leaves out rank {world.rank}, which must not call init")
    watch.expected = ranks
    everyone = world.Get_group()
    part = everyone.Incl(ranks)
    try:
        with watch.mpi_blocks():
            sub = world.Create_group(part)
    finally:
        part.Free()
        everyone.Free()
    try:
        return _connect_mpi(mpi, sub, config, watch)
    finally:
        sub.Free()


def _connect_mpi(mpi: Any, comm: Any, config: Config, watch: StartWatch) -> Membership:
    from hvdlite.common.transport.mpi import connect as connect_over_mpi

    watch.expected = _world_ranks(mpi, comm)
    group = comm.Get_group()
    try:
        transport = connect_over_mpi(comm, config, watch.give_up)
    except BaseException:
        group.Free()
        skip_mpi_finalize()
        raise
    if comm.size == mpi.COMM_WORLD.size:
        allow_mpi_finalize()
    return Membership(transport, group)


def _world_ranks(mpi: Any, comm: Any) -> list[int]:
    """Return the ranks of `comm` in COMM_WORLD; those of another world are left out."""
    world = mpi.COMM_WORLD.Get_group()
    try:
        return [rank for rank in members_of_communicator(comm, world) if rank >= 0]
    finally:
        world.Free()


def _check_launcher(size: int, library: str) -> None:
    """Raise `HorovodInternalError` when another MPI has started this process than it has loaded."""
    for name in SIZES:
        ranks = os.environ.get(name, "")
        if ranks.isdigit() and int(ranks) > 1 and size == 1:
            raise HorovodInternalError(
                f"the launcher has started {ranks} ranks ({name}), but the MPI library that mpi4py "
                f"has loaded knows of this one only: it is {library.split(',', maxsplit=1)[0]!r}. "
                "Start the job with the mpirun of that library, or with hvdlite-run"
            )
