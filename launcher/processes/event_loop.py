"""One wait for everything that a process listens to: pipes, sockets, signals."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from hvdlite.common.connections.loop import READ, WRITE, Loop

Handler = Callable[[int], object]  # called with the file descriptor that is ready


class EventLoop(Loop):
    """Calls the handlers of file descriptors that are ready, in one thread."""

    def listen(self, fd: int, handler: Handler) -> None:
        """Call `handler` whenever `fd` can be read."""
        self.watch(fd, READ, lambda _events: handler(fd))

    def when_writable(self, fd: int, handler: Handler) -> None:
        """Call `handler` whenever `fd` can be written."""
        self.watch(fd, WRITE, lambda _events: handler(fd))

    def forget(self, fd: int) -> None:
        """Stop waiting for `fd`; one that nobody waits for, or that was closed, does no harm."""
        with contextlib.suppress(OSError):
            super().forget(fd)
