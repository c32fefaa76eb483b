"""Connect the ranks of a job: from their launch to an exchange, and from that to a transport."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from hvdlite.common.base.errors import ConfigError, HorovodInternalError
from hvdlite.common.base.networks import has_fabric
from hvdlite.common.decisions.control_tree import neighbours
from hvdlite.common.meeting.detection import detect
from hvdlite.common.meeting.exchange import Exchange
from hvdlite.common.meeting.launch import MPI as STARTED_BY_MPI
from hvdlite.common.meeting.launch import SINGLE, Launch
from hvdlite.common.meeting.meet import meet
from hvdlite.common.meeting.placement import host_identity
from hvdlite.common.meeting.torch_store import default_group
from hvdlite.common.runtime.mpi_process import (
    allow_mpi_finalize,
    members_of_communicator,
    running_world,
    skip_mpi_finalize,
    start_mpi,
)
from hvdlite.common.runtime.process_sets import is_communicator
from hvdlite.common.runtime.start_watch import StartWatch
from hvdlite.common.settings.config import Config
from hvdlite.common.transport.base import Transport
from hvdlite.common.transport.inprocess import solo

# Which transport connects the ranks: a pure function of what all of them say.


AUTO, TCP, MPI = "auto", "tcp", "mpi"
REMEDY = "start it with hvdlite-run --launcher mpirun, or with mpirun"
SECRET = "HVDLITE_SECRET"


class Wish(NamedTuple):
    """What one rank has for the choice."""

    transport: str  # AUTO, TCP or MPI
    collectives: str  # The setting that asks for collectives of MPI, with its value, or "".
    fabric: bool  # Whether its host has a network that MPI drives and TCP does not.


def wish_of(config: Config) -> Wish:
    """Return the wish of this rank. Raises `ConfigError` for settings that exclude each other."""
    settings = {"HVDLITE_ALLREDUCE": config.allreduce, "HVDLITE_DATA_PLANE": config.data_plane}
    collectives = next((f"{name}={MPI}" for name, each in settings.items() if each == MPI), "")
    if collectives and config.transport == TCP:
        raise ConfigError(
            f"{collectives} needs MPI between the ranks, and HVDLITE_TRANSPORT=tcp excludes it: "
            "remove one of them"
        )
    return Wish(config.transport, collectives, has_fabric())


def check_without_mpi(launch: Launch, config: Config) -> None:
    """Raise `ConfigError` when a setting asks for MPI, and MPI has not started this rank."""
    wish = wish_of(config)
    asked = "HVDLITE_TRANSPORT=mpi" if wish.transport == MPI else wish.collectives
    if asked:
        raise ConfigError(
            f"{asked} needs MPI, and this job was not started by MPI ({', '.join(launch.evidence)}"
            f", from {launch.source}): {REMEDY}"
        )


def choose_transport(wishes: Sequence[Wish]) -> str:
    """Return TCP or MPI for a job whose ranks have these wishes.

    Raises `ConfigError` naming two ranks that disagree.
    """
    for name, values in (
        ("HVDLITE_TRANSPORT", [wish.transport for wish in wishes]),
        ("the setting that asks for MPI", [wish.collectives or "none" for wish in wishes]),
    ):
        for rank, value in enumerate(values):
            if value != values[0]:
                raise ConfigError(
                    f"ranks disagree on {name}: rank 0 has {values[0]}, rank {rank} has {value}"
                )
    first = wishes[0]
    if first.transport != AUTO:
        return first.transport
    return MPI if first.collectives or all(wish.fabric for wish in wishes) else TCP


class Connected(NamedTuple):
    """What a rank begins with."""

    transport: Transport
    mpi_group: Any = None  # The ranks as MPI knows them; None without MPI.
    sets: Sequence[tuple[int, ...]] = ()  # The ranks of process sets of an earlier world.


def find_launch() -> Launch:
    """Return who has started this process. Raises `ConfigError` where sources disagree."""
    return detect(os.environ, running_world(), default_group())


def connect(comm: Any, launch: Launch, config: Config) -> Connected:
    """Connect this rank with the others; blocks until all have connected.

    `comm` is None for all ranks of the job, a list of world ranks, or an mpi4py communicator.
    Raises `ValueError` for anything else, `ConfigError` for settings that ask for an MPI that is
    not there, and as the transports do.
    """
    if is_communicator(comm):
        return _connect_communicator(comm, launch, config)
    if comm is not None and not isinstance(comm, (list, tuple, range)):
        raise ValueError(
            f"Invalid type of argument comm: {type(comm).__name__} {comm!r}; "
            "give None, a list of world ranks, or an mpi4py communicator"
        )
    ranks = list(comm or ())
    if launch.source == STARTED_BY_MPI:
        return _connect_started_by_mpi(ranks, launch, config)
    if launch.source == SINGLE:
        if ranks not in ([], [0]):
            raise ValueError(f"comm={comm}: this job has rank 0 only; start it with hvdlite-run")
        return Connected(solo())
    check_without_mpi(launch, config)
    return _connect_without_mpi(ranks, launch, config)


def _check_ranks(ranks: list[int], rank: int, size: int) -> None:
    """Raise `ValueError` unless `ranks` are ranks of the job, and `rank` is one of them."""
    foreign = [each for each in ranks if not isinstance(each, int) or not 0 <= each < size]
    if foreign:
        raise ValueError(f"comm={ranks}: there is no rank {foreign[0]} in a job of {size}")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"comm={ranks} names a rank twice")
    if rank not in ranks:
        raise ValueError(f"comm={ranks} leaves out rank {rank}, which must not call init")


def _all_ranks(size: int) -> tuple[list[int], list[int]]:
    """Return the two ways to say all ranks of the job; some ranks may say one, others the other."""
    return [], list(range(size))


# -- without MPI


def _connect_without_mpi(ranks: list[int], launch: Launch, config: Config) -> Connected:
    if ranks:
        _check_ranks(ranks, launch.rank, launch.size)
    if len(ranks) == 1:
        return Connected(solo())
    members = None if ranks in _all_ranks(launch.size) else ranks
    deadline = time.monotonic() + config.start_timeout_seconds
    exchange = meet(launch, members, os.environ.get(SECRET, "").encode(), deadline)
    try:
        return Connected(_connect_over_tcp(exchange, config, deadline))
    finally:
        exchange.close()


def _connect_over_tcp(exchange: Exchange, config: Config, deadline: float) -> Transport:
    from hvdlite.common.transport.tcp.connect import connect as connect_over_tcp

    return connect_over_tcp(
        exchange, config, deadline, neighbours,
        host=host_identity(), secret=os.environ.get(SECRET, "").encode(),
    )  # fmt: skip


# -- with MPI


def _connect_started_by_mpi(ranks: list[int], launch: Launch, config: Config) -> Connected:
    with StartWatch(launch, config.start_timeout_seconds) as watch:
        mpi = _start_or_none(launch, config, watch)
        if mpi is not None:
            world = mpi.COMM_WORLD
            if ranks in _all_ranks(world.size):
                return _connect_all_of(mpi, world, config, watch)
            return _connect_ranks(mpi, ranks, config, watch)
    assert launch.instead is not None
    return connect(ranks, launch.instead, config)


def _start_or_none(launch: Launch, config: Config, watch: StartWatch) -> Any:
    """Return MPI, started; None where it knows nothing of the others, and Slurm does.

    Raises `HorovodInternalError` when another MPI has started this process than it has loaded.
    """
    try:
        mpi = start_mpi(config, watch)
    except (ImportError, RuntimeError):  # mpi4py finds no library of MPI.
        if launch.instead is None:
            raise
        return None
    if mpi.COMM_WORLD.size > 1 or (launch.size <= 1 and launch.instead is None):
        return mpi
    if launch.instead is not None:
        return None
    library = mpi.Get_library_version().split(",", maxsplit=1)[0]
    raise HorovodInternalError(
        f"the launcher has started {launch.size} ranks ({', '.join(launch.evidence)}), but the MPI "
        f"library that mpi4py has loaded knows of this one only: it is {library!r}. "
        "Start the job with the mpirun of that library, or with hvdlite-run"
    )


def _connect_ranks(mpi: Any, ranks: list[int], config: Config, watch: StartWatch) -> Connected:
    world = mpi.COMM_WORLD
    _check_ranks(ranks, world.rank, world.size)
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
        return _connect_all_of(mpi, sub, config, watch)
    finally:
        sub.Free()


def _connect_communicator(comm: Any, launch: Launch, config: Config) -> Connected:
    me = launch if launch.source == STARTED_BY_MPI else None
    with StartWatch(me, config.start_timeout_seconds) as watch:
        mpi = start_mpi(config, watch)
        if mpi.COMM_WORLD.size == 1 and launch.size > 1 and comm != mpi.COMM_SELF:
            raise ConfigError(
                "init(comm=...) was given a communicator of MPI, which knows of this process only, "
                f"and {' and '.join(launch.evidence)} (from {launch.source}) say that the job has "
                f"{launch.size} ranks: {REMEDY}"
            )
        return _connect_all_of(mpi, comm, config, watch)


def _connect_all_of(mpi: Any, comm: Any, config: Config, watch: StartWatch) -> Connected:
    """Connect the ranks of `comm`, over MPI or over TCP."""
    from hvdlite.common.meeting.exchange import MpiExchange
    from hvdlite.common.transport.mpi import connect as connect_over_mpi
    from hvdlite.common.transport.mpi import duplicate

    world = mpi.COMM_WORLD.Get_group()
    try:  # Ranks of another world are left out.
        watch.expected = [rank for rank in members_of_communicator(comm, world) if rank >= 0]
    finally:
        world.Free()
    group = comm.Get_group()
    try:
        deadline = time.monotonic() + config.start_timeout_seconds
        control = duplicate(comm, deadline, watch.give_up)
        exchange = MpiExchange(control)
        bodies = exchange.allgather(msgpack.packb(wish_of(config)))
        if choose_transport([Wish(*msgpack.unpackb(body)) for body in bodies]) == TCP:
            transport = _connect_over_tcp(exchange, config, deadline)
            control.Free()
        else:
            transport = connect_over_mpi(control, config, watch.give_up)
    except BaseException:
        group.Free()
        skip_mpi_finalize()
        raise
    if comm.size == mpi.COMM_WORLD.size:
        allow_mpi_finalize()
    return Connected(transport, group)
