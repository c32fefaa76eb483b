"""The libraries that are compared: each starts collectives in its own way, and waits for them.

A collective works on flat arrays. Its size is that of the larger side: what allgather returns and
what reducescatter takes; each rank has 1/N of it on the other side. allreduce and broadcast (from
rank 0) work in place.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import numpy as np
from measuring import say
from numpy.typing import NDArray

Array = NDArray[Any]
Start = Callable[[Any, Any, str], Any]  # source, target, name -> handle

COLLECTIVES = ("allreduce", "allgather", "reducescatter", "broadcast", "alltoall")


class Peer(Protocol):
    """A library. What it lacks raises an exception, on all ranks alike."""

    starts: Mapping[str, Start]  # collective -> how it is started

    def view(self, array: Array) -> Any:
        """The library's own tensor on the memory of a flat array."""

    def wait(self, handle: Any) -> Any:
        """The resulting tensor, once it is there."""


def torch_view(array: Array) -> Any:
    """A torch tensor on the memory of a flat array."""
    import torch

    return torch.frombuffer(array.view(np.uint8), dtype=getattr(torch, array.dtype.name))


class HorovodApi:
    """hvdlite and Horovod: the functions have the same names for every framework."""

    def __init__(self, name: str, view: Callable[[Array], Any]) -> None:
        self._module = module = importlib.import_module(name)
        self.view = view
        module.init()
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


class Gloo:
    """torch.distributed. A handle goes with the tensor that will be the result."""

    def __init__(self) -> None:
        import torch.distributed as dist

        start_gloo()
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


def start_gloo() -> None:
    """torch.distributed's default group, on the ranks of hvdlite; they meet in a file."""
    import torch.distributed as dist

    import hvdlite.torch as hvd

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        path = hvd.broadcast_object(f"{folder}/store", name="gloo.store")
        store = dist.FileStore(path, hvd.size())
        dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
        hvd.barrier()  # rank 0 removes the folder


class Mpi:
    """MPI's blocking calls, by mpi4py, in the same processes. A handle is the result itself."""

    def __init__(self) -> None:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
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


PEERS: dict[str, Callable[[], Peer]] = {
    "hvdlite numpy": lambda: HorovodApi("hvdlite.numpy", lambda array: array),
    "hvdlite torch": lambda: HorovodApi("hvdlite.torch", torch_view),
    "gloo": Gloo,
    "MPI": Mpi,
    # Its thread polls all the time: where there are few cores, it slows the others down.
    "Horovod": lambda: HorovodApi("horovod.torch", torch_view),
}


def open_peers(names: Sequence[str]) -> dict[str, Peer]:
    """Those of the libraries that are installed."""
    found: dict[str, Peer] = {}
    for name in names:
        try:
            found[name] = PEERS[name]()
        except ImportError as error:
            say(f"left out: {name} ({error})")
    return found
