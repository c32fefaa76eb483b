"""What a launcher says of a process that it has started: its rank, and where the ranks meet.

What is read of environment variables is kept with them, so that messages can say where it is from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.connections.address import Address

MPI, OWN, TORCH_GROUP, TORCH_AGENT = "MPI", "hvdlite", "torch.distributed", "torchrun"
MASTER, SLURM, SINGLE = "MASTER_ADDR", "Slurm", "nobody"
ELASTIC = "the driver of an elastic job"
RENDEZVOUS = "HVDLITE_RENDEZVOUS"
DRIVER, WORKER = "HVDLITE_ELASTIC_DRIVER", "HVDLITE_WORKER"  # Of a worker of an elastic job.


class WorldRank(NamedTuple):
    """A rank and the number of ranks, as a library in this process says them."""

    rank: int
    size: int


@dataclass(frozen=True)
class Launch:
    """A rank as its launcher describes it; -1 and "" stand for what the launcher leaves out."""

    source: str
    rank: int = 0
    size: int = 1
    local_rank: int = -1
    local_size: int = -1
    # Tells jobs apart that run at the same time; equal on all ranks of a job.
    job: str = ""
    # Where the ranks meet: one of these.
    addresses: tuple[Address, ...] = ()
    # Whether rank 0 serves there. Somebody else does otherwise.
    rank_0_serves: bool = False
    # Tells a restart of the same job at the same address apart.
    incarnation: str = ""
    # Where the ranks meet when MPI, contrary to its variables, knows of one rank only.
    instead: Launch | None = None
    # The variables that this is from, with their values, for messages.
    evidence: tuple[str, ...] = ()


def first_set(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return the first of `names` that is set, or an empty name."""
    return next((name for name in names if environ.get(name, "").strip()), "")


def first_number(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return the first of `names` that holds a number, or an empty name."""
    return next((name for name in names if environ.get(name, "").isdecimal()), "")


def launch_with(environ: Mapping[str, str], source: str, rank: str, size: str) -> Launch:
    """Return a launch with the rank and size of these variables. Raises `ConfigError`."""
    numbers = _number(environ, rank), _number(environ, size)
    evidence = spell(environ, rank, size)
    if numbers[0] >= numbers[1]:
        raise ConfigError(f"{' and '.join(evidence)}: there is no such rank")
    return Launch(source, *numbers, evidence=evidence)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r}: must be a whole number")
    return int(text)


def spell(environ: Mapping[str, str], *names: str) -> tuple[str, ...]:
    """Return variables with their values, as a user would set them."""
    return tuple(f"{name}={environ[name]}" for name in names)
