"""The entries of tensors: how the tensors of any framework pass through the engine."""

from __future__ import annotations

import math
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.api.options import CallOptions
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.requests.entries import Entry, Key, Series, key_of
from hvdlite.common.requests.handles import Event, Handle
from hvdlite.common.requests.messages import NO_BIT, Request
from hvdlite.common.tensors.adapter import (
    Adapter,
    CpuBuffer,
    HostBuffer,
    Place,
    TensorSpec,
    numpy_dtype,
)

T = TypeVar("T")

NO_ROOM = "the target has"  # The text of the error of a result that is larger or smaller.


class TensorEntry(Entry, Generic[T]):
    """A tensor on its way through the engine."""

    def __init__(
        self,
        request: Request,
        adapter: Adapter[T],
        tensor: T,
        target: T | None,
        splits: tuple[int, ...] = (),
        handle: Handle | None = None,
    ) -> None:
        super().__init__(request, handle)
        self.splits = splits
        self.result = target  # None: made when the shape of the output is known
        self._adapter = adapter
        self._tensor = tensor
        self._error = ""  # Why this rank cannot have its result.
        self._written = False  # Not where a reduce has another root.
        self._output: HostBuffer | None = None if target is None else adapter.output(target)
        if target is tensor and type(self._output) is CpuBuffer:  # the tensor's own memory
            self._input: HostBuffer = self._output
        else:
            self._input = adapter.input(tensor)
        self.device_input = self._input.on_device
        self.size_bytes = self._input.nbytes

    def wait(self) -> None:
        """Sleep until the input may be read."""
        self._input.wait()

    @property
    def input(self) -> NDArray[Any]:
        """The input as a flat array."""
        return self._input.array

    def output(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the output of this shape as a flat array."""
        if self._output is None:
            self.result = self._adapter.empty_like(self._tensor, shape)
            self._output = self._adapter.output(self.result)
        elif self._output.array.size != math.prod(shape):
            # Memory that nobody reads: the others shall have their results all the same.
            self._refuse(shape, self._output.array.size)
            return np.empty(math.prod(shape), numpy_dtype(self.request.dtype))
        self._written = True
        return self._output.array

    def device_output(self, shape: tuple[int, ...]) -> Any:
        """Return the output of this shape as a `DeviceOutput`."""
        if self._output is not None and self._output.on_device.buffer.numel() != math.prod(shape):
            self._refuse(shape, self._output.on_device.buffer.numel())
            return self._input.on_device.new_result(shape)[1].on_device
        if self._output is None:
            self.result, self._output = self._input.on_device.new_result(shape)
        return self._output.on_device

    def complete_on_device(self, event: Event | None) -> None:
        """Complete the handle: the device has the result when `event` occurs; None: it has."""
        if self._error:
            self.handle.fail(HorovodInternalError(self._error, job_goes_on=True))
        else:
            self.handle.complete(event=event)

    def _refuse(self, shape: tuple[int, ...], room: int) -> None:
        """Let the entry fail after its run, as the target has no room for the result."""
        request = self.request
        self._error = (
            f"{request.collective} '{request.name}': {NO_ROOM} {room} "
            f"elements, and the result has {math.prod(shape)}, of the shape {list(shape)}"
        )
        self._output = None

    @property
    def target_address(self) -> int:
        """Where the memory begins that is written in place, in bytes; in place only."""
        assert self._output is not None
        if self._output.on_device is not None:
            return int(self._output.on_device.address)
        address: int = self._output.array.__array_interface__["data"][0]
        return address

    def release(self) -> None:
        """Drop the tensors: the entry has ended, and is renewed for the next step."""
        self.result = None

    def complete(self, value: Any = None) -> None:
        """Copy the output to its device, and complete the handle; the collective has run."""
        if self._error:
            self.handle.fail(HorovodInternalError(self._error, job_goes_on=True))
            return
        if self._output is not None and self._written:
            self._output.commit()
        self.handle.complete(value)

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows from each member, () where all give the same number; valid after the run."""
        return self.received_splits or self.response.first_dims

    def wait_for_result(self) -> T:
        """Sleep until the collective has run; return the result."""
        self.handle.wait()
        if self.result is None:  # Only the root of a reduce has a result.
            return self._tensor
        self._adapter.finish(self.result)
        return self.result


class PreparedCall(NamedTuple):
    """A call on one tensor that was checked, as the next one with such a tensor need not be."""

    spec: TensorSpec
    options: CallOptions | None
    request: Request
    key: Key
    elements: int
    size_bytes: int

    @classmethod
    def of(cls, spec: TensorSpec, options: CallOptions | None, request: Request) -> PreparedCall:
        """Return the prepared call of a request."""
        elements = math.prod(spec.shape)
        size_bytes = elements * numpy_dtype(spec.dtype).itemsize
        return cls(spec, options, request, key_of(request), elements, size_bytes)


class PlacedEntry(TensorEntry[T]):
    """A tensor in contiguous memory of the host that is reduced in place.

    Its array is made only where a backend asks for it. One entry may serve a tensor of the same
    properties in every step.
    """

    def __init__(
        self,
        call: PreparedCall,
        adapter: Adapter[T],
        tensor: T,
        place: Place,
        handle: Handle | None = None,
    ) -> None:
        # Not by the constructors above: one of these is made for each gradient of each step.
        self.request = call.request
        self.key = call.key
        self.handle = Handle() if handle is None else handle
        self.sent_bit = NO_BIT
        self.spec = call.spec
        self.count = call.elements
        self.size_bytes = call.size_bytes
        self._adapter = adapter
        self._array: NDArray[Any] | None = None
        self.address, self._owner = place
        self.result: T | None = tensor

    def renew(self, tensor: T, place: Place, handle: Handle) -> None:
        """Serve another tensor of the same properties; the last use has ended."""
        self.handle = handle
        self.sent_bit = NO_BIT
        self.address, self._owner = place
        self.result = tensor

    def release(self) -> None:
        """Drop the tensor, so that its memory is free for the next step."""
        self.result = self._array = self._owner = None

    def wait(self) -> None:
        """Return at once: host memory is always ready."""

    @property
    def input(self) -> NDArray[Any]:
        """The tensor as a flat array."""
        if self._array is None:
            assert self.result is not None
            self._array = self._adapter.output(self.result).array
        return self._array

    def output(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the same array."""
        return self.input

    @property
    def target_address(self) -> int:
        """Where the memory begins that is written in place, in bytes."""
        assert self.address is not None
        return self.address

    def complete(self, value: Any = None) -> None:
        """Complete the handle; the collective has run."""
        self.handle.complete(value)


class NumberedEntry(PlacedEntry[T]):
    """A placed tensor of a series, whose request is made only where somebody asks for it."""

    def __init__(
        self, call: PreparedCall, series: Series, number: int, adapter: Adapter[T], tensor: T,
        place: Place,
    ) -> None:  # fmt: skip
        # Not by the constructors above: small calls take no longer than a few of these.
        self.series = series
        self.number = number
        self.key = series.key(number)
        self.handle = Handle()
        self.sent_bit = NO_BIT
        self.spec = call.spec
        self.count = call.elements
        self.size_bytes = call.size_bytes
        self._adapter = adapter
        self._array = None
        self.address, self._owner = place
        self.result = tensor

    def __getattr__(self, name: str) -> Any:
        """Return the request when it is asked for the first time."""
        if name != "request":
            raise AttributeError(name)
        assert self.series is not None
        self.request = request = self.series.numbered(self.number)
        return request


def entry_of_transfer(
    request: Request, adapter: Adapter[T], tensor: T, spec: TensorSpec, *, sends: bool
) -> TensorEntry[T]:
    """Return an entry for a tensor that is sent, or received into; its result is the tensor."""
    place = adapter.place(tensor, spec)
    if place is not None:
        call = PreparedCall.of(spec, None, request)
        return PlacedEntry(call, adapter, tensor, place)
    entry = TensorEntry(request, adapter, tensor, None if sends else tensor)
    entry.result = tensor
    return entry


def entry_of(
    call: PreparedCall,
    adapter: Adapter[T],
    tensor: T,
    target: T | None,
    handle: Handle | None = None,
) -> TensorEntry[T]:
    """Return an entry for one tensor."""
    if target is tensor:
        place = adapter.place(tensor, call.spec)
        if place is not None:
            return PlacedEntry(call, adapter, tensor, place, handle)
    return TensorEntry(call.request, adapter, tensor, target, handle=handle)
