"""Streams for the CPU: a device module like ``torch.cuda``, whose streams are threads.

By it tensors on the CPU take the way of an accelerator, where nobody has one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

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
