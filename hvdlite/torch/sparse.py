"""The sum of sparse tensors over all ranks, which gathers the entries of each rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hvdlite.common.api.options import CallOptions
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
        """Start to reduce a sparse COO tensor; return a function that waits for the result.

        Every rank gives a tensor of the same shape, dtype and number of sparse dimensions, with any
        number of entries. `op` is Sum or Average. The function returns a new sparse tensor that
        is not coalesced. Two collectives run, ``<name>.indices`` and ``<name>.values``.

        Raises `ValueError` for a tensor of another layout, and for another op.
        """
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
            layout = getattr(tensor, "layout", type(tensor).__name__)
            raise ValueError(f"sparse_allreduce '{name}' needs a sparse COO tensor, not {layout}")
        if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            raise ValueError(f"sparse_allreduce '{name}': op is Sum or Average, not {op!r}")
        detached = tensor.detach()
        parts = {"indices": detached._indices().t(), "values": detached._values()}
        operations = [
            self._runner.start("allgather", [part], f"{name}.{part_name}", CallOptions(process_set))
            for part_name, part in parts.items()
        ]

        def wait() -> torch.Tensor:
            (indices,), (all_values,) = (operation.wait_for_tensors() for operation in operations)
            all_indices = indices.t()
            if op == ReduceOp.AVERAGE:
                is_integer = not (all_values.is_floating_point() or all_values.is_complex())
                rounding_mode = "trunc" if is_integer else None
                all_values = torch.div(all_values, process_set.size(), rounding_mode=rounding_mode)
            return torch.sparse_coo_tensor(
                all_indices, all_values, tensor.shape, check_invariants=False
            )

        return wait
