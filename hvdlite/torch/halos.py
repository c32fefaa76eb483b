"""`halo` on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.common.api import halo as common
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.torch import mpi_ops

Tensor = torch.Tensor


class _TorchArrays(common.Arrays[Tensor]):
    def shape(self, array: Tensor) -> Sequence[int]:
        return array.shape

    def move(self, array: Tensor, dim: int, to: int) -> Tensor:
        return array.movedim(dim, to)

    def concatenate(self, arrays: Sequence[Tensor], dim: int) -> Tensor:
        return torch.cat(list(arrays), dim)

    def border(self, array: Tensor, dim: int, width: int, value: float) -> Tensor:
        return array.new_full((*array.shape[:dim], width, *array.shape[dim + 1 :]), value)

    def exchange(
        self, rows: Tensor, splits: list[int], name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Any]:
        output, received = mpi_ops.alltoall(rows, splits, name, process_set)
        return output, received


_ARRAYS = _TorchArrays()


def halo(
    x: Tensor,
    dim: int,
    before: int,
    after: int,
    process_set: ProcessSet = global_process_set,
    *,
    fill: float | None = 0.0,
    name: str | None = None,
) -> Tensor:
    """Return the slice `x` of a larger tensor between the edges of its neighbours' slices.

    The larger tensor is cut along `dim`, and its slices lie on the ranks of `process_set` in their
    order. `before` entries come from the rank before this one and `after` entries from the one
    behind it; all ranks give the same numbers. Beyond the whole tensor there is `fill`, the zeros
    of a padded convolution; None adds nothing there. Slices may differ along `dim` only.

    Differentiable: the gradients of the edges go back to the ranks that own them, and are added
    there. Backward must reach this call on all ranks.

    Raises `ValueError` for numbers that are negative or wider than the slice, and for a dimension
    that is not there; `HorovodInternalError` where ranks disagree.
    """
    return common.halo(_ARRAYS, x, dim, before, after, process_set, fill, name)


__all__ = ["halo"]
