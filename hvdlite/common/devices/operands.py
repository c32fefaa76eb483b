"""The tensors of a segment at one rank, as the collectives on devices see them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.table import SPECS
from hvdlite.common.devices.interface import Buffer, Context, DeviceOutput, Stream
from hvdlite.common.requests.entries import Entry
from hvdlite.common.requests.messages import Request, Response
from hvdlite.common.tensors.adapter import numpy_dtype

# Neutral data, which a joined rank gives for tensors that it does not have.


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


class EntryOperand:
    """A tensor that this rank has."""

    def __init__(self, entry: Entry, outputs: list[DeviceOutput]) -> None:
        self._entry = entry
        self._outputs = outputs
        self.response = entry.response
        self.splits = entry.splits

    @property
    def received_splits(self) -> tuple[int, ...]:
        return self._entry.received_splits

    @received_splits.setter
    def received_splits(self, splits: tuple[int, ...]) -> None:
        self._entry.received_splits = splits

    @property
    def source(self) -> Buffer:
        assert self._entry.device_input is not None
        return self._entry.device_input.buffer

    def target(self, shape: tuple[int, ...]) -> Buffer:
        output: DeviceOutput = self._entry.device_output(shape)
        self._outputs.append(output)
        return output.buffer


class JoinedOperand:
    """A tensor that this rank does not have, as it has joined: neutral data."""

    received_splits: tuple[int, ...] = ()

    def __init__(self, response: Response, context: Context, stream: Stream, members: int) -> None:
        self.response = response
        self.splits = (0,) * members
        self._context = context
        self._stream = stream

    @property
    def source(self) -> Buffer:
        request = self.response.request
        value, count = neutral(request)
        buffer = self._context.empty(count, request.dtype)
        self._context.run(self._stream, lambda: self._context.fill(buffer, value))
        return buffer

    def target(self, shape: tuple[int, ...]) -> Buffer:
        return self._context.empty(math.prod(shape), self.response.request.dtype)
