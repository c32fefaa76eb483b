"""`halo` on numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.common.api.forms import Forms
from hvdlite.common.api.halo import Arrays
from hvdlite.common.api.runner import EngineRunner
from hvdlite.common.plain.numpy_adapter import Array, NumpyAdapter
from hvdlite.common.runtime.process_sets import ProcessSet


class _NumpyArrays(Arrays[Array]):
    def __init__(self) -> None:
        self._forms: Forms[Array] = Forms(EngineRunner(NumpyAdapter()))

    def shape(self, array: Array) -> Sequence[int]:
        return array.shape

    def move(self, array: Array, dim: int, to: int) -> Array:
        return np.moveaxis(array, dim, to)

    def concatenate(self, arrays: Sequence[Array], dim: int) -> Array:
        return np.concatenate(arrays, dim)

    def border(self, array: Array, dim: int, width: int, value: float) -> Array:
        return np.full((*array.shape[:dim], width, *array.shape[dim + 1 :]), value, array.dtype)

    def exchange(
        self, rows: Array, splits: list[int], name: str | None, process_set: ProcessSet
    ) -> tuple[Array, Any]:
        output, received = self._forms.alltoall(rows, splits, name, process_set)
        return output, received


halo = _NumpyArrays().halo

__all__ = ["halo"]
