"""The sum of sparse tensors over all ranks, by gathering what each has."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hvdlite.common.api.options import Options
from hvdlite.common.api.runner import EngineRunner
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set


class SparseForms:
    """The reduction of sparse tensors, whose dense parts `runner` gathers."""

    def __init__(self, runner: EngineRunner[torch.Tensor]) -> None:
        self._runner = runner

    def sparse_allreduce_async(
        self,
        tensor: torch.Tensor,
        name: str,
        op: int,
        process_set: ProcessSet = global_process_set,
    ) -> Callable[[], torch.Tensor]:
        """Start to reduce a sparse COO tensor over all ranks; a function that waits for the result.

        Every rank gives a tensor of the same shape, dtype and number of sparse dimensions, with any
        number of entries. `op` is Sum or Average. The function returns a new sparse tensor that
        is not coalesced. Two collectives travel, ``<name>.indices`` and ``<name>.values``.

        Raises `ValueError` for a tensor of another layout, and for another op.
        """
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
            layout = getattr(tensor, "layout", type(tensor).__name__)
            raise ValueError(f"sparse_allreduce '{name}' needs a sparse COO tensor, not {layout}")
        if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            raise ValueError(f"sparse_allreduce '{name}': op is Sum or Average, not {op!r}")
        detached = tensor.detach()
        parts = {"indices": detached._indices().t(), "values": detached._values()}
        started = [
            self._runner.start("allgather", [part], f"{name}.{what}", Options(process_set))
            for what, part in parts.items()
        ]

        def wait() -> torch.Tensor:
            (indices,), (all_values,) = (operation.take() for operation in started)
            all_indices = indices.t()
            if op == ReduceOp.AVERAGE:
                whole = (
                    None if all_values.is_floating_point() or all_values.is_complex() else "trunc"
                )
                all_values = torch.div(all_values, process_set.size(), rounding_mode=whole)
            return torch.sparse_coo_tensor(
                all_indices, all_values, tensor.shape, check_invariants=False
            )

        return wait
