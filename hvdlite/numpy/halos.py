"""`halo` on numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.common.api import halo as common
from hvdlite.common.api.forms import Forms
from hvdlite.common.api.runner import EngineRunner
from hvdlite.common.plain.numpy_adapter import Array, NumpyAdapter
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set


class _NumpyArrays(common.Arrays[Array]):
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


_ARRAYS = _NumpyArrays()


def halo(
    x: Array,
    dim: int,
    before: int,
    after: int,
    process_set: ProcessSet = global_process_set,
    *,
    fill: float | None = 0.0,
    name: str | None = None,
) -> Array:
    """Return the slice `x` of a larger array between the edges of its neighbours' slices.

    The larger array is cut along `dim`, and its slices lie on the ranks of `process_set` in their
    order. `before` entries come from the rank before this one and `after` entries from the one
    behind it; all ranks give the same numbers. Beyond the whole array there is `fill`; None adds
    nothing there. Slices may differ along `dim` only.

    Raises `ValueError` for numbers that are negative or wider than the slice, and for a dimension
    that is not there; `HorovodInternalError` where ranks disagree.
    """
    return common.halo(_ARRAYS, x, dim, before, after, process_set, fill, name)


__all__ = ["halo"]
