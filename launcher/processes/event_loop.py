"""One wait for everything that a process listens to: pipes, sockets, signals."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from hvdlite.common.connections.loop import READ, Loop

Handler = Callable[[int], object]  # called with the file descriptor that is ready


class EventLoop(Loop):
    """Calls the handlers of file descriptors that are ready, in one thread."""

    def __init__(self) -> None:
        super().__init__()
        self._look: Callable[[float], object] = lambda now: None
        self._look_seconds = 1.0
        self._look_at = 0.0

    def look_every(self, seconds: float, look: Callable[[float], object]) -> None:
        """Let `wait` call `look` with the time: for what goes without a word, such as a host."""
        self._look, self._look_seconds = look, seconds

    def wait(self, *times: float) -> float:
        """Sleep until something comes, one of `times` is there, or a look is due; return the time.

        What has come is handled, and a look that is due is taken.
        """
        self.run_once(max(0.0, min([self._look_at, *times]) - self.now()))
        now = self.now()
        if now >= self._look_at:
            self._look_at = now + self._look_seconds
            self._look(now)
        return now

    def listen(self, fd: int, handler: Handler) -> None:
        """Call `handler` whenever `fd` can be read."""
        self.watch(fd, READ, lambda _events: handler(fd))

    def forget(self, fd: int) -> None:
        """Stop waiting for `fd`; one that nobody waits for, or that was closed, does no harm."""
        with contextlib.suppress(OSError):
            super().forget(fd)
