"""The collectives on torch tensors, and the questions about the job: rank, size and others.

It is called as in Horovod, and has no more to do with MPI than the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite.common.api.forms import Forms
from hvdlite.common.api.halo import Arrays
from hvdlite.common.api.options import CallOptions
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.segment_plan import (
    set_comm_fusion,
    set_split_strategy_by_idx,
    set_split_strategy_by_size,
)
from hvdlite.common.runtime import public_names
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.runtime.public_names import *  # noqa: F403
from hvdlite.torch.adapter import TorchAdapter
from hvdlite.torch.autograd import TorchRunner, untraced
from hvdlite.torch.dtypes import use_torch_casts

use_torch_casts()
runner = TorchRunner(TorchAdapter())
forms = Forms(runner)

allreduce = untraced(forms.allreduce)
allreduce_async = untraced(forms.allreduce_async)
allreduce_ = untraced(forms.allreduce_)
allreduce_async_ = untraced(forms.allreduce_async_)
grouped_allreduce = untraced(forms.grouped_allreduce)
grouped_allreduce_async = untraced(forms.grouped_allreduce_async)
grouped_allreduce_ = untraced(forms.grouped_allreduce_)
grouped_allreduce_async_ = untraced(forms.grouped_allreduce_async_)
allgather = untraced(forms.allgather)
allgather_async = untraced(forms.allgather_async)
grouped_allgather = untraced(forms.grouped_allgather)
grouped_allgather_async = untraced(forms.grouped_allgather_async)
broadcast = untraced(forms.broadcast)
broadcast_async = untraced(forms.broadcast_async)
broadcast_ = untraced(forms.broadcast_)
broadcast_async_ = untraced(forms.broadcast_async_)
alltoall = untraced(forms.alltoall)
alltoall_async = untraced(forms.alltoall_async)
reducescatter = untraced(forms.reducescatter)
reducescatter_async = untraced(forms.reducescatter_async)
grouped_reducescatter = untraced(forms.grouped_reducescatter)
grouped_reducescatter_async = untraced(forms.grouped_reducescatter_async)
join = untraced(forms.join)
barrier = untraced(forms.barrier)
poll = untraced(forms.poll)
synchronize = untraced(forms.synchronize)


@untraced
def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str,
    op: int,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start to reduce a sparse COO tensor; return a function that waits for the result.

    Every rank gives a tensor of the same shape, dtype and number of sparse dimensions, with any
    number of entries. `op` is Sum or Average. The function returns a new sparse tensor, which is
    coalesced only if it is an average of integers. Two collectives run, ``<name>.indices`` and
    ``<name>.values``.

    Raises `ValueError` for a tensor of another layout, and for another op; the function raises
    `HorovodInternalError` where shapes or ops of ranks differ.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        layout = getattr(tensor, "layout", type(tensor).__name__)
        raise ValueError(f"sparse_allreduce '{name}' needs a sparse COO tensor, not {layout}")
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise ValueError(f"sparse_allreduce '{name}': op is Sum or Average, not {op!r}")
    detached = tensor.detach()
    parts = {"indices": detached._indices().t(), "values": detached._values()}
    # Else indices of a larger tensor would be written behind a smaller one.
    alike = f"a sparse tensor {[*tensor.shape]}, {ReduceOp(op).name.capitalize()}"
    options = CallOptions(process_set, settings=alike)
    operations = [
        runner.start("allgather", [part], f"{name}.{part_name}", options)
        for part_name, part in parts.items()
    ]

    def wait() -> torch.Tensor:
        (indices,), (all_values,) = (operation.wait_for_tensors() for operation in operations)
        size, shape = process_set.size(), tensor.shape
        exact = not (all_values.is_floating_point() or all_values.is_complex())
        if op == ReduceOp.AVERAGE and not exact:
            all_values = all_values / size
        result = torch.sparse_coo_tensor(indices.t(), all_values, shape, check_invariants=False)
        if op == ReduceOp.AVERAGE and exact:  # The sum is divided, not what is added up.
            result = result.coalesce()
            result.values().div_(size, rounding_mode="trunc")
        return result

    return wait


class _TorchArrays(Arrays[torch.Tensor]):
    def shape(self, array: torch.Tensor) -> Sequence[int]:
        return array.shape

    def move(self, array: torch.Tensor, dim: int, to: int) -> torch.Tensor:
        return array.movedim(dim, to)

    def concatenate(self, arrays: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        return torch.cat(list(arrays), dim)

    def border(self, array: torch.Tensor, dim: int, width: int, value: float) -> torch.Tensor:
        return array.new_full((*array.shape[:dim], width, *array.shape[dim + 1 :]), value)

    def exchange(
        self, rows: torch.Tensor, splits: list[int], name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, Any]:
        output, received = alltoall(rows, splits, name, process_set)
        return output, received


halo = _TorchArrays().halo


__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "halo",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "set_comm_fusion",
    "set_split_strategy_by_idx",
    "set_split_strategy_by_size",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += public_names.__all__
