"""The contexts of devices that torch knows: streams, events, memory and copies; see devices.md.

The CPU is one of them, whose streams are threads. By it tensors on the CPU take the way of an
accelerator, where nobody has one.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hvdlite.common.devices.interface import Event, HostMemory, TimedEvent
from hvdlite.common.devices.nccl.cudart import begin_thread
from hvdlite.common.devices.nccl.library import KIND
from hvdlite.common.meeting.placement import host_identity
from hvdlite.common.settings.config import Config
from hvdlite.torch.device_modules import Streams, event_on, pins, streams_of
from hvdlite.torch.dtypes import DTYPES, as_array

Work = Callable[[], object]


class HostStream:
    """Work that a thread does in order. The thread begins with the first work."""

    def __init__(self, device: Any = None) -> None:
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.error = ""  # Why some work has failed; what follows it is done all the same.

    def add(self, work: Work) -> None:
        """Queue work."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hvdlite-stream", daemon=True)
            self._thread.start()
        self._work.put(work)

    def wait_event(self, event: HostEvent) -> None:
        """Let the thread sleep until an event."""
        self.add(event.synchronize)

    def close(self) -> None:
        """End the thread after all work."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:
                self.error = self.error or f"{type(error).__name__}: {error}"
            del work  # It holds tensors, and the next work may come late.


class _CurrentStream:
    """The stream of a thread itself, which does everything at once."""

    def add(self, work: Work) -> None:
        work()

    def wait_event(self, event: HostEvent) -> None:
        event.synchronize()


class HostEvent:
    """A point in the work of a stream."""

    def __init__(self, *, blocking: bool = True, enable_timing: bool = False) -> None:
        self._occurred = threading.Event()
        self._at = 0.0

    def record(self, stream: HostStream | _CurrentStream) -> None:
        """Let the event occur after all work that is queued."""
        stream.add(self._occur)

    def _occur(self) -> None:
        self._at = time.monotonic()
        self._occurred.set()

    def elapsed_time(self, later: HostEvent) -> float:
        """Return the milliseconds to another event."""
        return (later._at - self._at) * 1000

    def query(self) -> bool:
        """Return whether it has occurred."""
        return self._occurred.is_set()

    def synchronize(self) -> None:
        """Sleep until it has occurred."""
        self._occurred.wait()


class HostStreams:
    """The device module."""

    Stream = HostStream
    Event = HostEvent

    def current_stream(self, device: Any = None) -> _CurrentStream:
        """Return the stream of the calling thread."""
        return _CurrentStream()

    def stream(self, stream: HostStream) -> AbstractContextManager[None]:
        """Return a context that changes nothing: torch computes in the calling thread."""
        return nullcontext()

    def device_count(self) -> int:
        """Return 1."""
        return 1


class TorchContext:
    """A device of a kind that has a module like ``torch.cuda``."""

    threads_wait = False

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self.device = device
        self.identity = f"{host_identity()} {_identity(device)}"
        self._streams = streams

    def new_stream(self) -> Any:
        """Return a stream for communication."""
        return self._streams.Stream(self.device)

    def free_stream(self, stream: Any) -> None:
        """Do nothing: torch frees it with the last reference."""

    def begin_thread(self) -> None:
        """Let the calling thread ask events of this device, and disturb no other thread.

        A thread that has chosen no device would use the first one, and memory of it.
        """
        choose = getattr(self._streams, "set_device", None)
        if choose is not None:
            choose(self.device)
        if self.device.type == KIND:
            begin_thread(Config.from_environ().cudart_library)

    def run(self, stream: Any, work: Callable[[], None]) -> None:
        """Queue what `work` does on a stream."""
        with self._streams.stream(stream):
            work()

    def allocating(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which new tensors belong to a stream."""
        return self._streams.stream(stream)

    def record(self, stream: Any) -> Event:
        """Return an event after all work that is queued on a stream."""
        return event_on(self._streams, stream)

    def record_timed(self, stream: Any) -> TimedEvent:
        """Return an event that knows when it occurs."""
        return _Timed(self._streams, stream)

    def wait(self, stream: Any, event: Event) -> None:
        """Let a stream wait for an event."""
        stream.wait_event(event)

    def empty(self, count: int, dtype: str) -> torch.Tensor:
        """Allocate memory without values."""
        return torch.empty(count, dtype=DTYPES[dtype], device=self.device)

    def fill(self, buffer: torch.Tensor, value: Any) -> None:
        """Set all elements."""
        buffer.fill_(value)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy each source to its target, in one kernel where torch has one."""
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)

    def scale(self, buffer: torch.Tensor, factor: float) -> None:
        """Multiply all elements."""
        buffer.mul_(factor)

    def host_memory(self, count: int, dtype: str) -> HostMemory:
        """Allocate memory of the host, pinned where torch does that for this kind of device."""
        pin = pins(self.device.type)
        tensor = torch.empty(count, dtype=DTYPES[dtype], pin_memory=pin)
        return HostMemory(tensor, as_array(tensor))

    def keep(self, buffer: torch.Tensor, stream: Any) -> None:
        """Keep the allocator from giving the memory away before `stream` is done."""
        buffer.record_stream(stream)


def context_of(kind: str, device: Any, local_rank: int) -> TorchContext:
    """Return the context of `device`, or of the one of this kind that the local rank has."""
    streams: Any = streams_of(kind)
    if device is None:
        device = torch.device(kind, local_rank % max(streams.device_count(), 1))
    return TorchContext(device, streams)


class _Timed:
    """An event of a device module, which measures in milliseconds."""

    def __init__(self, streams: Streams, stream: Any) -> None:
        self._event = streams.Event(enable_timing=True)
        self._event.record(stream)

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: _Timed) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1000


def _identity(device: torch.device) -> str:
    """Return what tells the device from others of this host, also in other processes.

    Numbers count what a process sees, which CUDA_VISIBLE_DEVICES and its kin change.
    """
    module: Any = getattr(torch, device.type, None)
    properties = getattr(module, "get_device_properties", None)
    uuid = getattr(properties(device), "uuid", None) if properties is not None else None
    if uuid is not None:
        return f"{device.type} {uuid}"
    seen = [
        f"{key}={value}"
        for key, value in sorted(os.environ.items())
        if key.endswith(("_VISIBLE_DEVICES", "_AFFINITY_MASK"))
    ]
    return " ".join([str(device), *seen])


class HostContext(TorchContext):
    """The CPU as a device: its streams are threads, and a thread that needs a result waits."""

    threads_wait = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.identity = f"{host_identity()} {os.getpid()} {threading.get_ident()}"
        self._streams = HostStreams()

    def free_stream(self, stream: HostStream) -> None:
        """End the thread."""
        stream.close()

    def run(self, stream: HostStream, work: Callable[[], None]) -> None:
        """Let the thread do `work`."""
        stream.add(work)

    def allocating(self, stream: HostStream) -> AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return nullcontext()

    def keep(self, buffer: torch.Tensor, stream: HostStream) -> None:
        """Do nothing: the work itself holds the memory."""
