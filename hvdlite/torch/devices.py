"""Where tensors live: the host itself, or a device that is reached through pinned host memory.

    input    training thread   device --copy--> pinned host memory, then a ready event
    wait     engine thread     sleep until the ready event
    commit   engine thread     pinned host memory --copy--> device, then a done event
    finish   training thread   the current stream waits for the done event; the thread does not

Both copies run on a stream of their own, so that they overlap with what the device computes.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hvdlite.common.plain.adapter import HOST_DEVICE, CpuBuffer, HostBuffer
from hvdlite.torch.dtypes import as_array


class Device(Protocol):
    """One kind of device; all tensors given to it are strided."""

    name: str  # what ranks compare

    def input(self, tensor: torch.Tensor) -> HostBuffer:
        """The values of `tensor`, which is not lazily conjugated. Calling thread."""

    def empty(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """A new tensor of the dtype and on the device of `like`, as `new_tensor`. Any thread."""

    def output(self, tensor: torch.Tensor) -> HostBuffer:
        """What `commit` carries into `tensor`, of any strides. Any thread."""

    def finish(self, tensor: torch.Tensor) -> None:
        """Order what the caller does next with `tensor` behind `commit`. Calling thread."""


def new_tensor(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor without values; one of the shape of `like` has its layout, as torch's own results.

    A gradient in another layout than its weights is wrong for kernels that take both as flat.
    """
    if like.shape == shape and not like.is_contiguous():
        return torch.empty_like(like.detach())
    return torch.empty(shape, dtype=like.dtype, device=like.device)


class HostDevice:
    """Tensors in the memory of the host: nothing is copied unless it is not contiguous."""

    name = HOST_DEVICE

    def input(self, tensor: torch.Tensor) -> HostBuffer:
        """The tensor's own memory, or a copy of one that is not contiguous."""
        return CpuBuffer(as_array(tensor.contiguous()))

    def empty(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """A new tensor."""
        return new_tensor(like, shape)

    def output(self, tensor: torch.Tensor) -> HostBuffer:
        """The tensor's own memory, or a buffer that is copied into one that is not contiguous."""
        if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            return CpuBuffer(as_array(tensor))
        return _ScatteredBuffer(tensor)

    def finish(self, tensor: torch.Tensor) -> None:
        """Host memory needs no ordering."""


class _ScatteredBuffer(CpuBuffer):
    """The output for a host tensor whose memory is not simply its values."""

    __slots__ = ("_host", "_target")

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self._host = torch.empty(target.shape, dtype=target.dtype)
        super().__init__(as_array(self._host))

    def commit(self) -> None:
        # `data`, since who looks at the version must not see this before `finish`.
        self._target.data.copy_(self._host)


class Event(Protocol):
    """A point in a stream, as ``torch.cuda.Event``."""

    def record(self, stream: Any) -> None:
        """Mark what `stream` has been given so far."""

    def synchronize(self) -> None:
        """Sleep until that is done."""


class Streams(Protocol):
    """What `StagedDevice` needs of ``torch.cuda``, or of a module like it."""

    def Stream(self, device: Any) -> Any:  # noqa: N802
        """A new queue of work on `device`."""

    def Event(self, *, blocking: bool) -> Event:  # noqa: N802
        """An event that is waited for asleep."""

    def current_stream(self, device: Any) -> Any:
        """The stream that the calling thread uses."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Within this, `stream` is the one that the calling thread uses."""


class StagedDevice:
    """An accelerator with streams: tensors pass through pinned memory of the host."""

    def __init__(self, name: str, streams: Streams, *, pin: bool = True) -> None:
        self.name = name
        self._streams = streams
        self._pin = pin
        self._lock = threading.Lock()  # guards the next one
        self._copy_streams: dict[torch.device, Any] = {}
        self._done: Any = WeakTensorKeyDictionary()  # output -> event after its copy to the device

    def input(self, tensor: torch.Tensor) -> HostBuffer:
        """Start to copy the tensor to the host, behind what is queued for it."""
        stream = self._behind_current(tensor)
        host = self._staging(tensor)
        with self._streams.stream(stream):
            host.copy_(tensor, non_blocking=True)
        self.keep_until_done(tensor, stream)
        return _StagedInput(host, self._event_on(stream))

    def empty(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """A new tensor; its memory belongs to the copy stream until `finish`."""
        with self._streams.stream(self._copy_stream(like.device)):
            return new_tensor(like, shape)

    def output(self, tensor: torch.Tensor) -> HostBuffer:
        """Pinned memory that `commit` starts to copy into the tensor."""
        return _StagedOutput(self, tensor, self._staging(tensor))

    def copy_out(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Start to copy pinned memory to the device. Engine thread."""
        stream = self._copy_stream(tensor.device)
        with self._streams.stream(stream):
            tensor.data.copy_(host, non_blocking=True)
        self._done[tensor] = self._event_on(stream)

    def finish(self, tensor: torch.Tensor) -> None:
        """The current stream waits for the copy; nobody else does."""
        event = self._done.pop(tensor, None)
        if event is not None:
            current = self._streams.current_stream(tensor.device)
            current.wait_event(event)
            self.keep_until_done(tensor, current)

    def keep_until_done(self, tensor: torch.Tensor, stream: Any) -> None:
        """The allocator must not give the tensor's memory away before `stream` is done with it."""
        tensor.record_stream(stream)

    def _staging(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pin)

    def _copy_stream(self, device: torch.device) -> Any:
        with self._lock:
            if device not in self._copy_streams:
                self._copy_streams[device] = self._streams.Stream(device)
            return self._copy_streams[device]

    def _behind_current(self, tensor: torch.Tensor) -> Any:
        """The copy stream, made to wait for what the caller has queued so far."""
        stream = self._copy_stream(tensor.device)
        stream.wait_event(self._event_on(self._streams.current_stream(tensor.device)))
        return stream

    def _event_on(self, stream: Any) -> Event:
        event = self._streams.Event(blocking=True)
        event.record(stream)
        return event


class _StagedInput(CpuBuffer):
    """A copy in pinned memory that is complete once its ready event has come."""

    __slots__ = ("_ready",)

    def __init__(self, host: torch.Tensor, ready: Event) -> None:
        super().__init__(as_array(host))
        self._ready = ready

    def wait(self) -> None:
        self._ready.synchronize()


class _StagedOutput(CpuBuffer):
    """Pinned memory that is copied to the device."""

    __slots__ = ("_device", "_host", "_target")

    def __init__(self, device: StagedDevice, target: torch.Tensor, host: torch.Tensor) -> None:
        super().__init__(as_array(host))
        self._device = device
        self._target = target
        self._host = host

    def commit(self) -> None:
        self._device.copy_out(self._host, self._target)


def find_device(kind: str) -> Device:
    """The device for tensors of a torch device type. Raises `ValueError` where there is none."""
    if kind == HOST_DEVICE:
        return HostDevice()
    if kind == "cuda":
        streams: Any = torch.cuda
        return StagedDevice(kind, streams)
    raise ValueError(
        f"tensors on {kind!r} cannot be communicated, only those on cpu and cuda: "
        "move the tensor with tensor.cpu()"
    )
