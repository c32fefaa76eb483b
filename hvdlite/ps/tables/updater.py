"""What holds the values of a table on a server: the user's own optimizer, or what only adds.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hvdlite.common.collectives.native.library import Library, library
from hvdlite.common.collectives.native.segment import TYPES
from hvdlite.ps.layouts.blocks import Array

# Sums of gradients in the order of their workers, in compiled code where there is a compiler.


def add_up(summands: Sequence[Array], *, average: bool, into: Array | None = None) -> Array:
    """Return the sum of arrays in their order, or their average, in their dtype.

    16-bit floats are added in float32. The result is written to `into` where it is given.
    """
    first = summands[0]
    result = np.empty_like(first) if into is None else into
    count = len(summands) if average else 1
    if count > 1 and first.dtype.kind in "iu":
        _add(summands, result, 1)
        result //= count
    else:
        _add(summands, result, count)
    return result


def divided(array: Array, count: int) -> Array:
    """Return an array divided by `count`, in its dtype, as `add_up` averages."""
    if count == 1:
        return array
    if array.dtype.kind in "iu":
        return array // count
    wide = wide_dtype(array.dtype)
    with np.errstate(all="ignore"):
        product: Array = array.astype(wide, copy=False) * wide.type(1 / count)
    return product.astype(array.dtype, copy=False)


def _add(summands: Sequence[Array], result: Array, count: int) -> None:
    """Set result to the sum, divided by `count` by a product, as floats are."""
    kernel, dtype = _kernel(), result.dtype
    if len(summands) == 1:
        np.copyto(result, summands[0])
        return
    if kernel is not None and dtype.name in TYPES:
        factor = 1 / count if dtype.itemsize == 8 else float(np.float32(1 / count))
        kernel.add(summands, result, factor)
        return
    wide = wide_dtype(dtype)
    total = result if wide == dtype else np.empty(result.size, wide)
    with np.errstate(all="ignore"):
        one, other = (each.astype(wide, copy=False) for each in summands[:2])
        np.add(one, other, out=total)
        for each in summands[2:]:
            total += each.astype(wide, copy=False)
        if count > 1:
            total *= wide.type(1 / count)
        if total is not result:
            np.copyto(result, total, casting="unsafe")


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values of a dtype are added up."""
    is_short = dtype.itemsize == 2 and dtype.kind not in "iu"
    return np.dtype(np.float32) if is_short else dtype


@functools.cache
def _kernel() -> Library | None:
    """Return the compiled code; None where there is none."""
    return library("auto", first_of_host=False)


class Updater(Protocol):
    """Holds the values of a table, one flat array for each block, and changes them.

    Whoever has nothing besides inherits `state` and `load`.
    """

    def begin(self, values: Sequence[Array]) -> None:
        """Take values, which the updater may keep."""

    def values(self) -> list[Array]:
        """Return the values, which the next `step` may change."""

    def step(self, gradients: Sequence[Array], numbers: Sequence[Mapping[str, Any]]) -> None:
        """Make an update; `numbers` are the hyperparameters of each parameter group, or empty.

        The gradients are there until it returns; those that cannot be written are their worker's.
        """

    def state(self) -> dict[str, Array]:
        """Return what belongs to the values, such as momenta."""
        return {}

    def load(self, state: Mapping[str, Array]) -> None:
        """Take back what `state` has returned."""
        return


@runtime_checkable
class LeavesOut(Protocol):
    """An `Updater` that can leave elements alone, for which there is no gradient."""

    def leave(self, spans: Sequence[Sequence[slice]]) -> None:
        """Let the next `step` leave these elements of each block, and their state, as they are."""


class Added(Updater):
    """Adds what is pushed to the values."""

    def __init__(self) -> None:
        self._values: list[Array] = []

    def begin(self, values: Sequence[Array]) -> None:
        self._values = [array if array.flags.writeable else array.copy() for array in values]

    def values(self) -> list[Array]:
        return self._values

    def step(self, gradients: Sequence[Array], numbers: Sequence[Mapping[str, Any]]) -> None:
        for values, pushed in zip(self._values, gradients, strict=True):
            np.add(values, pushed, out=values)
