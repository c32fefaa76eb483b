"""The tensors of a segment at one rank, as the collectives on devices see them."""

from __future__ import annotations

import math
from typing import Any

from hvdlite.common.collectives.kernels import neutral_value
from hvdlite.common.collectives.table import SPECS
from hvdlite.common.devices.interface import Buffer, Context, DeviceOutput, Stream
from hvdlite.common.requests.entries import Entry
from hvdlite.common.requests.messages import Request, Response

# Neutral data, which a joined rank gives for tensors that it does not have.


def neutral(request: Request) -> tuple[Any, int]:
    """Return the neutral value of a tensor, and how many elements a joined rank gives."""
    shape = request.shape
    if SPECS[request.collective].varying_rows:
        shape = (0, *shape[1:])
    return neutral_value(request), math.prod(shape)


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
