"""`halo` on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.common.api.halo import Arrays
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.torch import mpi_ops

Tensor = torch.Tensor


class _TorchArrays(Arrays[Tensor]):
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


halo = _TorchArrays().halo

__all__ = ["halo"]
