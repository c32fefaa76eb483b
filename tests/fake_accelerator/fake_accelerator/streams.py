"""The device module of the fake accelerator, in the place of ``torch.cuda``.

A stream is a thread that does work in order. It can be held before some work, and be slow.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CLOCK_AHEAD_SECONDS = 1000.0  # The device has another clock than the host.
Work = Callable[[], object]


class FakeStream:
    """Work in order, done by a thread."""

    def __init__(self, device: Any = None, delay_seconds: float = 0.0) -> None:
        self.delay_seconds = delay_seconds  # Before each work.
        self.error: Exception | None = None  # Of the first work that has failed.
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="fake-stream", daemon=True).start()

    def add(self, work: Work) -> None:
        """Queue work."""
        self._work.put(work)

    def hold(self) -> Callable[[], None]:
        """Let the stream stop here until the returned function is called."""
        gate = threading.Event()
        self.add(gate.wait)
        return gate.set

    def wait_event(self, event: FakeEvent) -> None:
        """Let the stream, and not the calling thread, wait for an event."""
        self.add(event.synchronize)

    def close(self) -> None:
        """End the thread after all work."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self.delay_seconds:
                time.sleep(self.delay_seconds)
            try:
                work()
            except Exception as error:
                self.error = self.error or error


class FakeEvent:
    """A point in a stream."""

    def __init__(self, *, blocking: bool = False) -> None:
        self._occurred = threading.Event()
        self._at = 0.0  # On the device's own clock.

    def record(self, stream: FakeStream) -> None:
        """Let it occur after the work that is queued on the stream."""
        stream.add(self._occur)

    def _occur(self) -> None:
        self._at = time.monotonic() + CLOCK_AHEAD_SECONDS
        self._occurred.set()

    def seconds_since(self, earlier: FakeEvent) -> float:
        """Return the time from another event to this one."""
        return self._at - earlier._at

    def query(self) -> bool:
        """Return whether it has occurred."""
        return self._occurred.is_set()

    def synchronize(self) -> None:
        """Sleep until it has occurred."""
        self._occurred.wait()


class FakeModule:
    """What ``torch.fake`` would be. Each thread has a current stream of its own."""

    Event = FakeEvent

    def __init__(self, delay_seconds: float = 0.0) -> None:
        self._delay_seconds = delay_seconds
        self._thread = threading.local()

    def Stream(self, device: Any = None) -> FakeStream:  # noqa: N802
        """Return a new stream."""
        return FakeStream(device, self._delay_seconds)

    def current_stream(self, device: Any = None) -> FakeStream:
        """Return the stream of the calling thread."""
        if not hasattr(self._thread, "stream"):
            self._thread.stream = FakeStream()
        stream: FakeStream = self._thread.stream
        return stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Make a stream the current one. Work is queued by `FakeStream.add` alone."""
        before = self.current_stream()
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def device_count(self) -> int:
        """Return 8."""
        return 8
