"""What a launcher says of a process that it has started: its rank, and where the ranks meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
