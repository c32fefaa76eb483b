"""The devices of tensors, by torch's device types: the host, and accelerators.

The tensors of the host are read and written where they are. Those of an accelerator are reached
through pinned host memory:

    input    training thread   device --copy--> pinned host memory, then a staged event
    wait     engine thread     sleep until the staged event
    commit   engine thread     pinned host memory --copy--> device, then a done event
    finish   training thread   the current stream waits for the done event; the thread does not

Both copies run on a stream of their own, so that they overlap with computation on the device.

Where a library reduces this kind of device in its own memory (common/devices), `input` only notes
the ready event, and no copy is made. A collective that the library does not run is staged then by
the engine thread.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch.utils.weak import WeakTensorKeyDictionary

from hvdlite.common.devices.interface import Event
from hvdlite.common.runtime.current import find
from hvdlite.common.tensors.adapter import HOST_DEVICE, CpuBuffer, HostBuffer, numpy_dtype
from hvdlite.common.tensors.result_memory import result_memory
from hvdlite.torch.device_modules import Streams, event_on, pins, streams_of
from hvdlite.torch.dtypes import DTYPE_NAMES, as_array, as_tensor


def new_tensor(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor without values. One of the shape of `like` has its strides.

    torch's own results have them too. A gradient with other strides than its weights is wrong for
    kernels that treat both as flat memory.
    """
    if like.shape == shape and not like.is_contiguous():
        return torch.empty_like(like.detach())
    return torch.empty(shape, dtype=like.dtype, device=like.device)


class HostDevice:
    """The memory of the host: only tensors that are not contiguous are copied."""

    name = HOST_DEVICE

    def input(self, tensor: torch.Tensor) -> HostBuffer:
        """Return the tensor's own memory, or a copy of one that is not contiguous."""
        return CpuBuffer(as_array(tensor.contiguous()))

    def empty(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a new tensor; see `result_memory`."""
        if like.shape == shape and not like.is_contiguous():
            return new_tensor(like, shape)
        memory = result_memory.lend(math.prod(shape) * like.itemsize)
        if memory is None:
            return new_tensor(like, shape)
        return as_tensor(memory.view(numpy_dtype(DTYPE_NAMES[like.dtype]))).view(shape)

    def output(self, tensor: torch.Tensor) -> HostBuffer:
        """Return the tensor's own memory, or a buffer for one that is not contiguous."""
        if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            return CpuBuffer(as_array(tensor))
        return _ScatteredBuffer(tensor)

    def finish(self, tensor: torch.Tensor) -> None:
        """Do nothing: host memory needs no ordering."""


class _ScatteredBuffer(CpuBuffer):
    """The output for a host tensor that is not contiguous, or lazily conjugated."""

    __slots__ = ("_host", "_target")

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self._host = torch.empty(target.shape, dtype=target.dtype)
        super().__init__(as_array(self._host))

    def commit(self) -> None:
        # The version of the tensor must not change before `finish`.
        # See [Note: views and version counters] in torch/optimizer/flat_gradients.py.
        self._target.data.copy_(self._host)


class StagedDevice:
    """An accelerator with streams: tensors pass through pinned memory of the host, or stay there.

    `is_direct` returns whether libraries run this kind of device.
    """

    def __init__(
        self,
        name: str,
        streams: Streams,
        *,
        pin: bool = True,
        is_direct: Callable[[str], bool] = lambda kind: False,
    ) -> None:
        self.name, self._streams, self._pin = name, streams, pin
        self._is_direct = is_direct
        # Where the device module has it: whether the caller records a graph of the device.
        self._records = getattr(streams, "is_current_stream_capturing", None)
        self._lock = threading.Lock()  # guards `_copy_streams`
        self._copy_streams: dict[torch.device, Any] = {}
        # The device of the first tensor, where libraries work for this rank.
        self.home: torch.device | None = None
        # By output: the event after which it is written. Set by the engine thread, removed by
        # `finish`.
        self._done: Any = WeakTensorKeyDictionary()

    def input(self, tensor: torch.Tensor) -> HostBuffer:
        """Note when the tensor is ready; start to copy it to the host, unless libraries run it.

        Raises `ValueError` while a graph is recorded, which would not repeat the negotiation.
        """
        if self._records is not None and self._records():
            raise ValueError(
                f"a collective on a tensor of shape {tuple(tensor.shape)} cannot be part of a "
                f"graph of {self.name}, as ranks agree on it each time: record a method of "
                "hvdlite.torch.accelerators.graphs.GraphCollectives, or call it outside of it"
            )
        if self.home is None:
            self.home = tensor.device
        direct = self._is_direct(self.name)
        flat = self.at_home(tensor) if direct else None
        ready = event_on(self._streams, self._streams.current_stream(tensor.device))
        staged = _DeviceInput(self, tensor, flat, ready)
        if not direct:
            staged.stage()
        return staged

    def at_home(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor as flat memory of the device on which this rank communicates.

        It is the tensor's own memory, if it is there and contiguous. A copy is behind the work that
        is queued on the current stream.
        """
        if tensor.device != self.home:
            tensor = tensor.to(self.home, non_blocking=True)
        return tensor.detach().contiguous().data.view(-1)

    def empty(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a new tensor, whose memory belongs to the copy stream until `finish`."""
        with self._streams.stream(self._copy_stream(like.device)):
            return new_tensor(like, shape)

    def output(self, tensor: torch.Tensor) -> HostBuffer:
        """Return a buffer whose pinned memory `commit` starts to copy into the tensor."""
        return _DeviceOutput(self, tensor)

    def copy_in(self, tensor: torch.Tensor, ready: Event) -> tuple[torch.Tensor, Event]:
        """Start to copy a tensor to pinned memory when it is ready; return that, and an event."""
        stream = self._copy_stream(tensor.device)
        stream.wait_event(ready)
        host = self.staging(tensor)
        with self._streams.stream(stream):
            host.copy_(tensor, non_blocking=True)
        self.keep_until_done(tensor, stream)
        return host, event_on(self._streams, stream)

    def copy_out(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Start to copy pinned memory to the device. Engine thread."""
        stream = self._copy_stream(tensor.device)
        with self._streams.stream(stream):
            tensor.data.copy_(host, non_blocking=True)
        self.written_by(tensor, event_on(self._streams, stream))

    def written_by(self, tensor: torch.Tensor, event: Event) -> None:
        """Remember when a tensor may be read."""
        self._done[tensor] = event

    def finish(self, tensor: torch.Tensor) -> None:
        """Let the current stream wait for the tensor. The calling thread does not wait."""
        event = self._done.pop(tensor, None)
        if event is not None:
            current = self._streams.current_stream(tensor.device)
            current.wait_event(event)
            self.keep_until_done(tensor, current)

    def keep_until_done(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the allocator from reusing the tensor's memory before `stream` is done with it."""
        if not tensor.is_cpu:
            tensor.record_stream(stream)

    def staging(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory of the host for the values of a tensor."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pin)

    def _copy_stream(self, device: torch.device) -> Any:
        with self._lock:
            if device not in self._copy_streams:
                self._copy_streams[device] = self._streams.Stream(device)
            return self._copy_streams[device]


class _DeviceInput:
    """A tensor on a device: itself for libraries (`DeviceInput`), and its copy on the host."""

    __slots__ = ("_device", "_flat", "_host", "_staged", "_tensor", "ready")

    def __init__(
        self, device: StagedDevice, tensor: torch.Tensor, flat: torch.Tensor | None, ready: Event
    ) -> None:
        """Keep `flat`, the tensor at home, if it is there yet; `ready` comes after its values."""
        self._device, self._tensor, self._flat, self.ready = device, tensor, flat, ready
        self._host: torch.Tensor | None = None
        self._staged: Event | None = None

    @property
    def on_device(self) -> _DeviceInput:
        return self

    @property
    def device(self) -> torch.device:
        return self._device.home or self._tensor.device

    @property
    def buffer(self) -> torch.Tensor:
        if self._flat is None:  # Libraries have come after the call.
            self.ready.synchronize()
            self._flat = self._device.at_home(self._tensor)
        return self._flat

    @property
    def nbytes(self) -> int:
        return self._tensor.numel() * self._tensor.element_size()

    def new_result(self, shape: tuple[int, ...]) -> tuple[torch.Tensor, HostBuffer]:
        result = new_tensor(self._tensor, shape)
        return result, self._device.output(result)

    def stage(self) -> None:
        """Start to copy the tensor to the host."""
        self._host, self._staged = self._device.copy_in(self._tensor, self.ready)

    def wait(self) -> None:
        if self._staged is None:
            self.stage()
        assert self._staged is not None
        self._staged.synchronize()

    @property
    def array(self) -> NDArray[Any]:
        assert self._host is not None, "wait() has not been called"
        return as_array(self._host)

    def commit(self) -> None:
        """Do nothing: it is not written."""


class _DeviceOutput:
    """A tensor on a device: libraries write it (`DeviceOutput`), or `commit` from the host."""

    __slots__ = ("_buffer", "_device", "_host", "_target")

    def __init__(self, device: StagedDevice, target: torch.Tensor) -> None:
        self._device = device
        self._target = target
        self._host: torch.Tensor | None = None
        self._buffer: torch.Tensor | None = None

    @property
    def on_device(self) -> _DeviceOutput:
        return self

    @property
    def nbytes(self) -> int:
        return self._target.numel() * self._target.element_size()

    @property
    def address(self) -> int:
        return self._target.data_ptr()

    @property
    def buffer(self) -> torch.Tensor:
        """Flat memory at home for the values of the tensor: its own where possible."""
        if self._buffer is None:
            target, home = self._target, self._device.home or self._target.device
            plain = target.is_contiguous() and not (target.is_conj() or target.is_neg())
            self._buffer = (
                target.data.view(-1)
                if plain and target.device == home
                else torch.empty(target.numel(), dtype=target.dtype, device=home)
            )
        return self._buffer

    def unpack(self) -> None:
        if self.buffer.data_ptr() != self._target.data_ptr():
            # See [Note: views and version counters] in torch/optimizer/flat_gradients.py.
            self._target.data.copy_(self.buffer.view(self._target.shape), non_blocking=True)

    def written_by(self, event: Event) -> None:
        self._device.written_by(self._target, event)

    def wait(self) -> None:
        """Do nothing: it is not read."""

    @property
    def array(self) -> NDArray[Any]:
        if self._host is None:
            self._host = self._device.staging(self._target)
        return as_array(self._host)

    def commit(self) -> None:
        if self._host is not None:
            self._device.copy_out(self._host, self._target)


class Device(Protocol):
    """One kind of device; its methods get strided tensors only."""

    name: str  # Ranks compare it, as all must have a tensor on the same kind of device.

    def input(self, tensor: torch.Tensor) -> HostBuffer:
        """Return the values of `tensor`, which is not lazily conjugated. Calling thread."""

    def empty(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a new tensor of the dtype and on the device of `like`. Any thread."""

    def output(self, tensor: torch.Tensor) -> HostBuffer:
        """Return a buffer that `commit` copies into `tensor`, of any strides. Any thread."""

    def finish(self, tensor: torch.Tensor) -> None:
        """Order the caller's next use of `tensor` behind `commit`. Calling thread."""


def runs_on_device(kind: str) -> bool:
    """Return whether libraries run collectives on this kind of device in the caller's job."""
    runtime = find()
    return runtime is not None and kind in runtime.engine.devices.agreement.kinds


HOST_AS_DEVICE = "host"  # The kind of tensors on the CPU that take the way of an accelerator.


def find_device(kind: str) -> Device:
    """Return the device for a torch device type. Raises `ValueError` for unsupported types."""
    if kind == HOST_DEVICE:
        if os.environ.get("HVDLITE_DEVICES", "") != "gloo":  # `init` checks the setting.
            return HostDevice()
        from hvdlite.torch.accelerators.context import HostStreams

        host: Any = HostStreams()
        return StagedDevice(HOST_AS_DEVICE, host, pin=False, is_direct=runs_on_device)
    return StagedDevice(kind, streams_of(kind), pin=pins(kind), is_direct=runs_on_device)
