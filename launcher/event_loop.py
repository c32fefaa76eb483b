"""One wait for everything that a process listens to: pipes, sockets, signals."""

from __future__ import annotations

import selectors
from collections.abc import Callable

Handler = Callable[[int], object]  # called with the file descriptor that is ready


class EventLoop:
    """Calls the handlers of file descriptors that are ready, in one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def listen(self, fd: int, handler: Handler) -> None:
        """Call `handler` whenever `fd` can be read."""
        self._selector.register(fd, selectors.EVENT_READ, handler)

    def when_writable(self, fd: int, handler: Handler) -> None:
        """Call `handler` whenever `fd` can be written."""
        self._selector.register(fd, selectors.EVENT_WRITE, handler)

    def forget(self, fd: int) -> None:
        """Stop waiting for `fd`; one that nobody waits for does no harm."""
        if fd >= 0 and fd in self._selector.get_map():
            self._selector.unregister(fd)

    def run_once(self, timeout_seconds: float) -> bool:
        """Wait, and call the handlers of what is ready; False when nothing was."""
        ready = self._selector.select(timeout_seconds)
        for key, _ in ready:
            # A handler that was called before may have closed this one.
            if self._selector.get_map().get(key.fd) is key:
                key.data(key.fd)
        return bool(ready)

    def close(self) -> None:
        """Close it; the file descriptors stay open."""
        self._selector.close()
