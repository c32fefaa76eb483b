"""Arithmetic of the backends: scaling, combining and rounding, the same on every rank.

Values of 16-bit types are widened to float32, combined and scaled there, and rounded once; a sum
that a member of a ring passes on is rounded as well (see `pipeline`). Integers are scaled in
float64 and truncated toward zero. A bool stays true when it is scaled by anything but zero; its sum
is "or", its product "and". All other types are scaled and combined in their own type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.base import Array, Reduction
from hvdlite.common.requests.messages import Request
from hvdlite.common.tensors.adapter import numpy_dtype

Cast = Callable[[Array, Array], None]  # (destination, source), both flat and of one length
# An overflow is the user's to find in the result: numpy must not warn from the engine's thread.
QUIET = partial(np.errstate, all="ignore")
BLOCK_BYTES = 128 << 10  # what a loop of kernels works on at a time, so that it stays in the cache


def _cast(destination: Array, source: Array) -> None:
    np.copyto(destination, source, casting="unsafe")


@dataclass(frozen=True)
class Casts:
    """How a 16-bit type becomes float32 and how float32 is rounded to it (to nearest, even)."""

    widen: Cast = _cast
    narrow: Cast = _cast


_casts = {"float16": Casts(), "bfloat16": Casts()}


def register_casts(dtype_name: str, casts: Casts) -> None:
    """Use `casts` for "float16" or "bfloat16" from now on: an adapter knows faster ones.

    They must give the same bits as numpy's, since another rank may not have them.
    """
    if dtype_name not in _casts:
        raise ValueError(f"{dtype_name!r} is not one of {', '.join(_casts)}")
    _casts[dtype_name] = casts


_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
_BOOL_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.logical_or,
    ReduceOp.MIN: np.logical_and,
    ReduceOp.MAX: np.logical_or,
    ReduceOp.PRODUCT: np.logical_and,
    ReduceOp.BAND: np.logical_and,
    ReduceOp.BOR: np.logical_or,
    ReduceOp.BXOR: np.logical_xor,
}


class Arithmetic:
    """One reduction of one dtype: load the inputs, merge them in order, store the result.

    Inputs and outputs have `dtype`; between `load` and `store` values have the dtype
    `accumulator`. `inner` and `outer` split a reduction in two stages.
    """

    def __init__(self, dtype: np.dtype[Any], reduction: Reduction) -> None:
        self.reduction = reduction
        # The dtype in which values are combined. The name takes a while to find out.
        widened = dtype.itemsize == 2 and dtype.name in _casts
        self.accumulator = np.dtype(np.float32) if widened else dtype
        self.input_dtype = self.output_dtype = dtype
        ufuncs = _BOOL_UFUNCS if dtype == np.bool_ else _UFUNCS
        self._ufunc = ufuncs[reduction.reduce_op]

    def inner(self) -> Arithmetic:
        """Return the first of two stages, which prescales and merges, and does not round."""
        stage = Arithmetic(
            self.input_dtype, Reduction(self.reduction.reduce_op, self.reduction.prescale)
        )
        stage.output_dtype = self.accumulator
        return stage

    def outer(self) -> Arithmetic:
        """Return the second of two stages: it merges results of `inner`, postscales and rounds."""
        op, postscale = self.reduction.reduce_op, self.reduction.postscale
        stage = Arithmetic(self.output_dtype, Reduction(op, postscale=postscale))
        stage.input_dtype = self.accumulator
        return stage

    @property
    def plain_input(self) -> bool:
        """Whether `load` would only copy."""
        return self.input_dtype == self.accumulator and self.reduction.prescale == 1

    def load(self, accumulator: Array, values: Array) -> None:
        convert(accumulator, values)
        scale(accumulator, self.reduction.prescale)

    def merge(self, accumulator: Array, later: Array) -> None:
        """Set accumulator = accumulator op later; both have the accumulator's dtype."""
        with QUIET():
            self._ufunc(accumulator, later, out=accumulator)

    def absorb(self, accumulator: Array, values: Array) -> None:
        """Set accumulator = accumulator op prescale * values."""
        if self.plain_input:
            self.merge(accumulator, values)
            return
        step = max(1, BLOCK_BYTES // self.accumulator.itemsize)
        scratch = np.empty(min(step, values.size), self.accumulator)
        for start in range(0, values.size, step):
            block = values[start : start + step]
            self.load(scratch[: block.size], block)
            self.merge(accumulator[start : start + step], scratch[: block.size])

    def store(self, output: Array, accumulator: Array) -> None:
        """Set output = postscale * accumulator, rounded. The accumulator is overwritten."""
        scale(accumulator, self.reduction.postscale)
        convert(output, accumulator)

    def reduce(self, parts: Sequence[Array], output: Array) -> None:
        """Set output = postscale * (prescale * parts[0] op prescale * parts[1] op ...), in order.

        `output` may be the memory of one of the parts, element for element.
        """
        step = max(1, BLOCK_BYTES // self.accumulator.itemsize)
        scratch = np.empty((2, min(step, output.size)), self.accumulator)
        plain = self.plain_input
        plain_output = self.output_dtype == self.accumulator and self.reduction.postscale == 1
        for start in range(0, output.size, step):
            block = slice(start, min(start + step, output.size))
            if len(parts) == 2 and plain and plain_output:
                with QUIET():
                    self._ufunc(parts[0][block], parts[1][block], out=output[block])
                continue
            total, loaded = scratch[:, : block.stop - start]
            self.load(total, parts[0][block])
            for part in parts[1:]:
                values = part[block]
                if not plain:
                    self.load(loaded, values)
                    values = loaded
                self.merge(total, values)
            self.store(output[block], total)


def convert(destination: Array, source: Array) -> None:
    """Copy, and convert where the dtypes differ."""
    if destination.dtype == source.dtype:
        np.copyto(destination, source)
    elif source.dtype.name in _casts:
        _casts[source.dtype.name].widen(destination, source)
    elif destination.dtype.name in _casts:
        with QUIET():
            _casts[destination.dtype.name].narrow(destination, source)
    else:
        raise TypeError(f"no collective converts {source.dtype} to {destination.dtype}")


def scale(values: Array, factor: float) -> None:
    """Multiply an accumulator by `factor` in place, by the rules at the top of the module."""
    if factor == 1:
        return
    kind = values.dtype.kind
    with QUIET():
        if kind == "b":
            values &= factor != 0
        elif kind in "iu":
            np.copyto(values, values.astype(np.float64) * factor, casting="unsafe")
        else:
            if kind == "c":  # A product with factor + 0j would make NaN beside an infinity.
                values = values.view(values.real.dtype)
            values *= values.dtype.type(factor)


def neutral_value(request: Request) -> Any:
    """Return the value that does not change a reduction after it was multiplied by the prescale.

    0 for a sum; for Min, Max and Product the identity, divided by the prescale factor; all bits for
    BAnd. None where there is none: few whole numbers become 1 when they are scaled.
    """
    dtype, reduce_op = numpy_dtype(request.dtype), ReduceOp(request.reduce_op)
    prescale = request.prescale_factor
    if reduce_op is ReduceOp.BAND:
        return True if dtype.kind == "b" else ~dtype.type(0)
    if reduce_op not in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT) or prescale == 0:
        return 0
    if dtype.kind == "b":  # Scaling leaves it as it is.
        return reduce_op is not ReduceOp.MAX
    exact = dtype.kind in "iu"
    if reduce_op is ReduceOp.PRODUCT:
        return _inverse(prescale, np.iinfo(dtype)) if exact else 1 / prescale
    highest = (reduce_op is ReduceOp.MIN) == (prescale > 0)
    if exact:
        return _farthest(highest, prescale, np.iinfo(dtype))
    return np.inf if highest else -np.inf


def _inverse(factor: float, limits: np.iinfo[Any]) -> int | None:
    """Return the whole number that becomes 1 when it is scaled, None without one."""
    value = math.ceil(1 / factor) if factor > 0 else math.floor(1 / factor)
    fits = limits.min <= value <= limits.max
    return value if fits and math.trunc(value * factor) == 1 else None


def _farthest(positive: bool, factor: float, limits: np.iinfo[Any]) -> int:
    """Return the whole number of this sign that is farthest from 0 before and after scaling."""
    most = int(limits.max if positive else -limits.min)
    most_scaled = int(limits.max if positive == (factor > 0) else -limits.min)
    if factor != 1:
        most = min(most, math.trunc(most_scaled / abs(factor)))
        while math.trunc(most * abs(factor)) > most_scaled:  # The product is one of float64.
            most = math.trunc(math.nextafter(most, 0.0))
    return most if positive else -most
