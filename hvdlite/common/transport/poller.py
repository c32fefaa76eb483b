"""One epoll for all that a rank waits for: descriptors with their handlers, and timers.

A handler must take away what it is called for: it reads, writes, or stops watching. Otherwise the
next `poll` calls it again, and the rank spins.
"""

from __future__ import annotations

import heapq
import itertools
import select
import time
from collections.abc import Callable

Handler = Callable[[int], None]  # Is given the events of its descriptor.
READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class Poller:
    """The descriptors and the timers of one rank; used by one thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()  # Orders the timers of one moment.

    def fileno(self) -> int:
        """Return a descriptor that can be read when a handler would be called."""
        return self._epoll.fileno()

    def watch(self, descriptor: int, events: int, handler: Handler) -> None:
        """Call `handler` when one of `events` occurs from now on; instead of any handler before."""
        if descriptor in self._handlers:
            self._epoll.modify(descriptor, events)
        else:
            self._epoll.register(descriptor, events)
        self._handlers[descriptor] = handler

    def forget(self, descriptor: int) -> None:
        """Stop to watch `descriptor`, before it is closed. Without effect if it is not watched."""
        if self._handlers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def call_at(self, when: float, function: Callable[[], None]) -> None:
        """Call `function` once, in the first `poll` from `when` (monotonic seconds) on."""
        heapq.heappush(self._timers, (when, next(self._count), function))

    def poll(self, timeout: float | None) -> bool:
        """Sleep until something occurs, at most `timeout` seconds (None: no limit), and handle it.

        Returns whether a handler of a descriptor was called. A timer that is due ends the sleep.
        """
        if self._timers:
            left = max(0.0, self._timers[0][0] - time.monotonic())
            timeout = left if timeout is None else min(timeout, left)
        ready = self._epoll.poll(timeout)
        for descriptor, events in ready:
            handler = self._handlers.get(descriptor)
            if handler is not None:  # Another handler may have closed it meanwhile.
                handler(events)
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()
        return bool(ready)

    def close(self) -> None:
        """Close the epoll; idempotent. The watched descriptors stay open."""
        self._epoll.close()
        self._handlers.clear()
        self._timers.clear()
