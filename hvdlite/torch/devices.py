"""The devices of tensors: the host, or an accelerator that is reached through pinned host memory.

    input    training thread   device --copy--> pinned host memory, then a ready event
    wait     engine thread     sleep until the ready event
    commit   engine thread     pinned host memory --copy--> device, then a done event
    finish   training thread   the current stream waits for the done event; the thread does not

Both copies run on a stream of their own, so that they overlap with computation on the device.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hvdlite.common.plain.adapter import HOST_DEVICE, CpuBuffer, HostBuffer, numpy_dtype
from hvdlite.common.plain.result_memory import result_memory
from hvdlite.torch.dtypes import DTYPE_NAMES, as_array, as_tensor


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
        # See [Note: views and version counters] in torch/flat_gradients.py.
        self._target.data.copy_(self._host)


class Event(Protocol):
    """A point in a stream, as ``torch.cuda.Event``."""

    def record(self, stream: Any) -> None:
        """Mark the work that is queued on `stream` so far."""

    def synchronize(self) -> None:
        """Sleep until that work is complete."""


class Streams(Protocol):
    """The part of ``torch.cuda``, or of a module like it, that `StagedDevice` needs."""

    def Stream(self, device: Any) -> Any:  # noqa: N802
        """Return a new queue of work on `device`."""

    # Returns an `Event`. With ``blocking=True``, where that is known, waiting threads sleep.
    Event: Callable[..., Any]

    def current_stream(self, device: Any) -> Any:
        """Return the stream that the calling thread uses."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which the calling thread uses `stream`."""


def new_event(streams: Streams) -> Event:
    """Return an event for which threads sleep, where the device module has the choice."""
    event: Event
    try:
        event = streams.Event(blocking=True)
    except TypeError:  # As torch.xpu: its threads always sleep.
        event = streams.Event()
    return event


class StagedDevice:
    """An accelerator with streams: tensors pass through pinned memory of the host."""

    def __init__(self, name: str, streams: Streams, *, pin: bool = True) -> None:
        self.name = name
        self._streams = streams
        self._pin = pin
        self._lock = threading.Lock()  # guards `_copy_streams`
        self._copy_streams: dict[torch.device, Any] = {}
        # By output: the event after its copy to the device. Set by the engine thread in `commit`,
        # removed by `finish`.
        self._done: Any = WeakTensorKeyDictionary()

    def input(self, tensor: torch.Tensor) -> HostBuffer:
        """Start to copy the tensor to the host, behind the work that computes it."""
        stream = self._behind_current(tensor)
        host = self._staging(tensor)
        with self._streams.stream(stream):
            host.copy_(tensor, non_blocking=True)
        self.keep_until_done(tensor, stream)
        return _StagedInput(host, self._event_on(stream))

    def empty(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a new tensor, whose memory belongs to the copy stream until `finish`."""
        with self._streams.stream(self._copy_stream(like.device)):
            return new_tensor(like, shape)

    def output(self, tensor: torch.Tensor) -> HostBuffer:
        """Return pinned memory that `commit` starts to copy into the tensor."""
        return _StagedOutput(self, tensor, self._staging(tensor))

    def copy_out(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Start to copy pinned memory to the device. Engine thread."""
        stream = self._copy_stream(tensor.device)
        with self._streams.stream(stream):
            tensor.data.copy_(host, non_blocking=True)
        self._done[tensor] = self._event_on(stream)

    def finish(self, tensor: torch.Tensor) -> None:
        """Let the current stream wait for the copy. The calling thread does not wait."""
        event = self._done.pop(tensor, None)
        if event is not None:
            current = self._streams.current_stream(tensor.device)
            current.wait_event(event)
            self.keep_until_done(tensor, current)

    def keep_until_done(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the allocator from reusing the tensor's memory before `stream` is done with it."""
        tensor.record_stream(stream)

    def _staging(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pin)

    def _copy_stream(self, device: torch.device) -> Any:
        with self._lock:
            if device not in self._copy_streams:
                self._copy_streams[device] = self._streams.Stream(device)
            return self._copy_streams[device]

    def _behind_current(self, tensor: torch.Tensor) -> Any:
        """Return the copy stream, which waits for the caller's work that is queued so far."""
        stream = self._copy_stream(tensor.device)
        stream.wait_event(self._event_on(self._streams.current_stream(tensor.device)))
        return stream

    def _event_on(self, stream: Any) -> Event:
        event = new_event(self._streams)
        event.record(stream)
        return event


class _StagedInput(CpuBuffer):
    """A copy in pinned memory, complete when its ready event has occurred."""

    __slots__ = ("_ready",)

    def __init__(self, host: torch.Tensor, ready: Event) -> None:
        super().__init__(as_array(host))
        self._ready = ready

    def wait(self) -> None:
        self._ready.synchronize()


class _StagedOutput(CpuBuffer):
    """Pinned memory that `commit` copies to the device."""

    __slots__ = ("_device", "_host", "_target")

    def __init__(self, device: StagedDevice, target: torch.Tensor, host: torch.Tensor) -> None:
        super().__init__(as_array(host))
        self._device = device
        self._target = target
        self._host = host

    def commit(self) -> None:
        self._device.copy_out(self._host, self._target)


def find_device(kind: str) -> Device:
    """Return the device for a torch device type. Raises `ValueError` for unsupported types."""
    if kind == HOST_DEVICE:
        return HostDevice()
    return StagedDevice(kind, streams_of(kind), pin=pins(kind))


_NEEDED = ("Stream", "Event", "current_stream", "stream")


def streams_of(kind: str) -> Streams:
    """Return the device module of a torch device type, such as ``torch.cuda`` or ``torch.npu``.

    Raises `ValueError` where torch has none, or one without streams.
    """
    try:
        module: Any = torch.get_device_module(kind)
    except RuntimeError:
        module = None
    missing = [name for name in _NEEDED if not hasattr(module, name)]
    if missing:
        lacks = f"torch.{kind} has no {', '.join(missing)}" if module else f"no module torch.{kind}"
        raise ValueError(
            f"tensors on {kind!r} cannot be communicated, only those on cpu and on accelerators "
            f"with streams ({lacks}): move the tensor with tensor.cpu(), or import the "
            "vendor's package"
        )
    streams: Streams = module
    return streams


def pins(kind: str) -> bool:
    """Return whether torch pins host memory for this device type: of one type at a time.

    A copy from and to memory that is not pinned is right, and waits in the calling thread.
    """
    current = getattr(getattr(torch, "accelerator", None), "current_accelerator", None)
    if current is None:  # Before torch 2.6.
        return kind == "cuda"
    accelerator = current()
    return kind == "cuda" if accelerator is None else bool(accelerator.type == kind)
