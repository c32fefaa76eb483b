"""The libraries under comparison, behind one interface to start a collective and wait for it.

A job uses one of them, also for its barriers, and imports no other.

A collective works on flat arrays. Its size is that of the larger side: what allgather returns and
what reducescatter takes; each rank has 1/N of it on the other side. allreduce and broadcast (from
rank 0) work in place.
"""

from __future__ import annotations

import atexit
import importlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import numpy as np
from measuring import Ranks, launched_rank
from numpy.typing import NDArray

Array = NDArray[Any]
Start = Callable[[Any, Any, str], Any]  # source, target, name -> handle

BARRIER = "barrier"  # without data
COLLECTIVES = ("allreduce", "allgather", "reducescatter", "broadcast", "alltoall", BARRIER)


class Peer(Ranks, Protocol):
    """A library. A collective or dtype that it lacks raises an exception on all ranks."""

    starts: Mapping[str, Start]  # collective -> how it is started

    def view(self, array: Array) -> Any:
        """Return the library's tensor on the memory of a flat array."""

    def wait(self, handle: Any) -> Any:
        """Wait for a collective, and return the resulting tensor."""


def torch_view(array: Array) -> Any:
    """Return a torch tensor on the memory of a flat array."""
    import torch

    return torch.frombuffer(array.view(np.uint8), dtype=getattr(torch, array.dtype.name))


class HorovodApi:
    """hvdlite or Horovod, whose functions have the same names for every framework."""

    def __init__(self, name: str, view: Callable[[Array], Any]) -> None:
        self._module = module = importlib.import_module(name)
        self.view = view
        module.init()
        self.rank, self.size = module.rank(), module.size()
        self.barrier: Callable[[], None] = module.barrier
        self.starts: Mapping[str, Start] = {
            "allreduce": lambda s, t, n: module.allreduce_async_(s, name=n, op=module.Sum),
            "allgather": lambda s, t, n: module.allgather_async(s, name=n),
            "reducescatter": lambda s, t, n: module.reducescatter_async(s, name=n, op=module.Sum),
            "broadcast": lambda s, t, n: module.broadcast_async_(s, 0, name=n),
            "alltoall": lambda s, t, n: module.alltoall_async(s, name=n),
        }

    def wait(self, handle: Any) -> Any:
        result = self._module.synchronize(handle)
        return result[0] if isinstance(result, tuple) else result  # alltoall: and the splits

    def largest(self, values: Sequence[float]) -> list[float]:
        found = self.view(np.array(values))
        return listed(self._module.allreduce(found, name="largest", op=self._module.Max))


class GlooRanks:
    """The ranks of a job that are connected by torch.distributed alone."""

    backend = "gloo"

    def __init__(self, meeting: Path, size: int) -> None:
        """Connect `size` ranks by the file `meeting`, which does not exist yet."""
        import torch.distributed as dist

        self.rank, self.size = launched_rank(), size
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(str(meeting), size)
        dist.init_process_group(self.backend, store=store, rank=self.rank, world_size=size)
        # At exit its threads would otherwise end the process by an abort, now and then.
        atexit.register(dist.destroy_process_group)
        self.barrier: Callable[[], None] = dist.barrier

    def largest(self, values: Sequence[float]) -> list[float]:
        import torch
        import torch.distributed as dist

        found = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return listed(found)


class Gloo(GlooRanks):
    """torch.distributed over gloo. A handle is a pair of the work and the resulting tensor."""

    def __init__(self, meeting: Path, size: int) -> None:
        import torch.distributed as dist

        super().__init__(meeting, size)
        # The newest torch has newer names, which an older one does not have.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        self.view = torch_view
        self.starts: Mapping[str, Start] = {
            "allreduce": lambda s, t, n: (dist.all_reduce(s, async_op=True), s),
            "allgather": lambda s, t, n: (dist.all_gather_into_tensor(t, s, async_op=True), t),
            "reducescatter": lambda s, t, n: (dist.reduce_scatter_tensor(t, s, async_op=True), t),
            "broadcast": lambda s, t, n: (dist.broadcast(s, 0, async_op=True), s),
            "alltoall": lambda s, t, n: (dist.all_to_all_single(t, s, async_op=True), t),
        }

    def wait(self, handle: Any) -> Any:
        work, result = handle
        work.wait()
        return result


class Mpi:
    """The blocking calls of MPI, by mpi4py. A handle is the result itself."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm = comm = MPI.COMM_WORLD
        self.rank, self.size = comm.rank, comm.size
        self.barrier: Callable[[], None] = comm.Barrier
        types = {"float32": MPI.FLOAT, "float64": MPI.DOUBLE}

        def number(array: Array) -> tuple[Array, Any]:
            if array.dtype.name not in types:
                raise TypeError(f"MPI cannot add {array.dtype.name}")
            return array, types[array.dtype.name]

        def raw(array: Array) -> tuple[Array, Any]:
            return array.view(np.uint8), MPI.BYTE

        self.starts: Mapping[str, Start] = {
            "allreduce": lambda s, t, n: comm.Allreduce(MPI.IN_PLACE, number(s)) or s,
            "allgather": lambda s, t, n: comm.Allgather(raw(s), raw(t)) or t,
            "reducescatter": lambda s, t, n: comm.Reduce_scatter_block(number(s), number(t)) or t,
            "broadcast": lambda s, t, n: comm.Bcast(raw(s), 0) or s,
            "alltoall": lambda s, t, n: comm.Alltoall(raw(s), raw(t)) or t,
        }

    def view(self, array: Array) -> Any:
        return array

    def wait(self, handle: Any) -> Any:
        return handle

    def largest(self, values: Sequence[float]) -> list[float]:
        from mpi4py import MPI

        found = np.array(values)
        self._comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
        return listed(found)


def listed(values: Any) -> list[float]:
    """Return a one-dimensional array or tensor as a list."""
    return [float(each) for each in values]


COPY = "copy"  # of the same bytes by each rank alone, beside hvdlite's barriers
# Each is given the file in which the ranks may meet, and their number; it raises `ImportError`
# where it is not installed.
PEERS: dict[str, Callable[[Path, int], Peer]] = {
    "hvdlite numpy": lambda meeting, size: HorovodApi("hvdlite.numpy", lambda array: array),
    "hvdlite torch": lambda meeting, size: HorovodApi("hvdlite.torch", torch_view),
    "gloo": Gloo,
    "MPI": lambda meeting, size: Mpi(),
    "Horovod": lambda meeting, size: HorovodApi("horovod.torch", torch_view),
    COPY: lambda meeting, size: HorovodApi("hvdlite.numpy", lambda array: array),
}
