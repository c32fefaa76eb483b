"""A pod of a job that Kubeflow Trainer would start with torchrun: its place, and where ranks meet.

Trainer gives each pod of a runtime with a torch policy the variables that torchrun reads. Without
PyTorch, ``hvdlite-run python train.py`` in each pod reads them instead. This module only looks at
variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.connections.address import Address

PREFIX = "PET_"
NODES, NODE_RANK, PER_NODE = "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE"
ADDRESS, PORT = "PET_MASTER_ADDR", "PET_MASTER_PORT"


@dataclass(frozen=True)
class TorchPod:
    """A pod that runs `ranks_per_pod` ranks of a job of `pods` pods."""

    pods: int
    index: int  # of this pod
    ranks_per_pod: int
    master: Address  # rank 0 listens there
    secret: str = field(default="", repr=False)  # of the job, if all pods have one

    @property
    def first_rank(self) -> int:
        return self.index * self.ranks_per_pod

    @property
    def size(self) -> int:
        """The number of ranks of the job."""
        return self.pods * self.ranks_per_pod


def find_torch_pod(environ: Mapping[str, str], num_proc: int | None) -> TorchPod | None:
    """Return what Trainer tells this pod; None where this is no such pod, or the only one.

    `num_proc` is the number of ranks that the user wants here. Raises `ConfigError` for variables
    that do not say the place of this pod.
    """
    if not all(environ.get(name) for name in (NODES, NODE_RANK, PER_NODE)):
        return None
    pods, index, ranks = (_number(environ, name) for name in (NODES, NODE_RANK, PER_NODE))
    if pods < 1 or ranks < 1 or index >= pods:
        raise ConfigError(
            f"{NODES}={pods}, {NODE_RANK}={index} and {PER_NODE}={ranks} are no place in a job: "
            f"pods are numbered from 0 to {NODES} - 1, and have at least one rank"
        )
    if pods == 1:
        return None
    if num_proc not in (None, ranks):
        raise ConfigError(
            f"-np {num_proc} contradicts {PER_NODE}={ranks}: leave out -np, and set numProcPerNode "
            "of the TrainJob"
        )
    host, port = environ.get(ADDRESS, ""), environ.get(PORT, "")
    if not host or not port:
        raise ConfigError(f"{NODES}={pods}, but not both of {ADDRESS} and {PORT} are set")
    secret = environ.get("HVDLITE_SECRET", "")
    return TorchPod(pods, index, ranks, Address(host, _number(environ, PORT)), secret)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not text.isdecimal():
        raise ConfigError(
            f"{name}={text!r}: hvdlite-run needs a number here; torchrun alone knows other words"
        )
    return int(text)
