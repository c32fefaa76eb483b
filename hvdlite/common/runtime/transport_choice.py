"""Which transport connects the ranks: a pure function of what all of them say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgpack

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.base.networks import has_fabric
from hvdlite.common.meeting.exchange import Exchange
from hvdlite.common.meeting.launch import Launch
from hvdlite.common.plain.config import Config

AUTO, TCP, MPI = "auto", "tcp", "mpi"
REMEDY = "start it with hvdlite-run --launcher mpirun, or with mpirun"


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


def agree_on_transport(exchange: Exchange, config: Config) -> str:
    """Return the transport of a job that MPI has started: TCP or MPI. Collective."""
    bodies = exchange.allgather(msgpack.packb(wish_of(config)))
    return choose_transport([Wish(*msgpack.unpackb(body)) for body in bodies])


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
