"""Collectives that a CUDA graph records, by hvdlite's own binding to NCCL.

A call of `hvd.allreduce` negotiates on the host, which a graph does not repeat. The collectives
here are queued on the current stream and nothing else: all members call them in the same order,
and replay their graphs in the same order. A collective that NCCL refuses, and any call after the
library has failed, raises `HorovodInternalError`.
"""

from __future__ import annotations

from typing import Any

import torch

from hvdlite.common.api.call_checks import members_of
from hvdlite.common.api.objects import allgather_object
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.base import Members
from hvdlite.common.devices.communicators import connect
from hvdlite.common.devices.interface import Communicator, Context, DeviceLibrary
from hvdlite.common.runtime.basics import local_rank
from hvdlite.common.runtime.current import current
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.transport.base import do_nothing
from hvdlite.torch.accelerators.nccl import of_cuda
from hvdlite.torch.device_modules import streams_of
from hvdlite.torch.dtypes import DTYPE_NAMES


class GraphCollectives:
    """The members of a process set, connected for one device of each."""

    def __init__(
        self,
        process_set: ProcessSet = global_process_set,
        *,
        device: torch.device | None = None,
        library: DeviceLibrary | None = None,
        streams: Any = None,
    ) -> None:
        """Connect all members, which call this in the same order; blocks.

        `device` is that of the local rank by default. `library` and `streams`, a module like
        ``torch.cuda``, are NCCL and ``torch.cuda``. Raises `HorovodInternalError` if the members
        cannot be connected, and `ValueError` where this process sees no device of NVIDIA.
        """
        found = library or of_cuda(blocks=True)
        if found is None:
            raise ValueError(
                "CUDA graphs need a device of NVIDIA, and torch sees none: see nvidia-smi, and "
                "torch.cuda.is_available()"
            )
        self._streams = streams or streams_of(found.device_kind)
        self._library = found
        self._context: Context = found.context(device, local_rank())
        runtime = current()
        ranks = members_of(runtime, "graph collectives", process_set)
        members = Members(ranks, ranks.index(runtime.rank), runtime.topology.restrict(ranks))
        outcome = connect(
            found,
            self._context,
            members,
            lambda mine: allgather_object(mine, process_set=process_set),
            do_nothing,
        )
        if outcome.communicator is None:
            raise HorovodInternalError(outcome.reason)
        self._communicator: Communicator = outcome.communicator
        self._rank, self._members = runtime.rank, members

    def allreduce_(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.AVERAGE) -> torch.Tensor:
        """Reduce a contiguous tensor in place; return it. Averages need a dtype of floats."""
        flat = self._flat(tensor)
        average = op == ReduceOp.AVERAGE
        reduced = ReduceOp.SUM if average else op
        if average and not tensor.is_floating_point():
            raise ValueError(f"rank {self._rank}: {tensor.dtype} has no average here: use op=Sum")
        self._check("allreduce", tensor, reduced)
        stream = self._stream(tensor)
        self._communicator.allreduce(flat, flat, reduced, stream)
        if average:
            factor = 1 / self._members.size
            self._context.run(stream, lambda: self._context.scale(flat, factor))
        self.check()
        return tensor

    def broadcast_(self, tensor: torch.Tensor, root_rank: int) -> torch.Tensor:
        """Copy a contiguous tensor of the global rank `root_rank` to all; return it."""
        if root_rank not in self._members.ranks:
            raise ValueError(f"root rank {root_rank} is not among {self._members.ranks}")
        root = self._members.ranks.index(root_rank)
        self._communicator.broadcast(self._flat(tensor), root, self._stream(tensor))
        self.check()
        return tensor

    def allgather_into(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Gather `source`, of the same size on all members, in their order; return `target`."""
        self._fits("allgather", target, source, self._members.size)
        flat = self._flat(source), self._flat(target)
        self._communicator.allgather(*flat, self._stream(source))
        self.check()
        return target

    def reducescatter_into(
        self, target: torch.Tensor, source: torch.Tensor, op: ReduceOp = ReduceOp.SUM
    ) -> torch.Tensor:
        """Reduce `source` and write the part of this member to `target`; return it."""
        self._fits("reducescatter", source, target, self._members.size)
        self._check("reducescatter", source, op)
        flat = self._flat(source), self._flat(target)
        self._communicator.reducescatter(*flat, op, self._stream(source))
        self.check()
        return target

    def check(self) -> None:
        """Raise `HorovodInternalError` if the library has failed; never wait."""
        if reason := self._communicator.async_error():
            raise HorovodInternalError(f"graph collectives of rank {self._rank}: {reason}")

    def abort(self) -> None:
        """End what is queued, so that streams go on. Any thread."""
        self._communicator.abort()

    def close(self) -> None:
        """Free everything; all graphs have run and were deleted: NCCL waits for that."""
        self._communicator.close()

    def _stream(self, tensor: torch.Tensor) -> Any:
        return self._streams.current_stream(tensor.device)

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_contiguous():
            raise ValueError(
                f"rank {self._rank}: a graph's tensor of shape {tuple(tensor.shape)} has strides "
                f"{tensor.stride()}: use tensor.contiguous()"
            )
        return tensor.detach().view(-1)

    def _check(self, collective: str, tensor: torch.Tensor, op: ReduceOp) -> None:
        name = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
        if not self._library.supports(collective, name, op):
            raise ValueError(
                f"rank {self._rank}: {self._library.name} does not run {collective} of {name} "
                f"with {op!r}"
            )

    def _fits(
        self, collective: str, larger: torch.Tensor, smaller: torch.Tensor, times: int
    ) -> None:
        counts = larger.numel(), smaller.numel()
        if larger.dtype != smaller.dtype or counts[0] != counts[1] * times:
            raise ValueError(
                f"rank {self._rank}: {collective} needs {times} times as many elements on one side,"
                f" of one dtype; not {counts[0]} of {larger.dtype} and {counts[1]} of "
                f"{smaller.dtype}"
            )
