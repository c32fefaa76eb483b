"""Neutral data, which a joined rank gives for tensors that it does not have."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.table import SPECS
from hvdlite.common.plain.adapter import numpy_dtype
from hvdlite.common.plain.messages import Request


def neutral(request: Request) -> tuple[Any, int]:
    """Return the neutral value of a tensor, and how many elements a joined rank gives."""
    shape = request.shape
    if SPECS[request.collective].varying_rows:
        shape = (0, *shape[1:])
    return neutral_value(request), math.prod(shape)


def neutral_value(request: Request) -> Any:
    """Return the value that does not change a reduction after it was multiplied by the prescale.

    0 for a sum; for Min, Max and Product the identity, divided by the prescale factor; all bits for
    BAnd.
    """
    dtype, reduce_op = numpy_dtype(request.dtype), ReduceOp(request.reduce_op)
    prescale = request.prescale_factor
    if reduce_op is ReduceOp.BAND:
        return True if dtype.kind == "b" else ~dtype.type(0)
    if reduce_op not in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT) or prescale == 0:
        return 0
    exact = dtype.kind in "iu"
    if reduce_op is ReduceOp.PRODUCT:
        return math.ceil(1 / prescale) if exact else 1 / prescale
    highest = (reduce_op is ReduceOp.MIN) == (prescale > 0)
    if dtype.kind == "b":
        return highest
    if exact:
        limits = np.iinfo(dtype)
        # The negative of the least integer does not exist in two's complement.
        lowest = max(limits.min, -limits.max) if prescale < 0 else limits.min
        limit = int(limits.max if highest else lowest)
        return limit if abs(prescale) <= 1 else math.trunc(limit / abs(prescale))
    return np.inf if highest else -np.inf
