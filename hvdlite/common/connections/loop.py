"""One epoll for all that a thread waits for: descriptors, timers, and calls from other threads.

A handler must take away what it is called for: it reads, writes, or stops watching. Otherwise the
next `run_once` calls it again, and the thread spins.

An exception of a handler ends `run_once`, and its caller decides whether to go on: a loop that went
on by itself would hide a fault that has left something half done. Nothing else is lost by it: what
was not handled is due in the next `run_once`. What strangers send raises nothing here, as a link
or a listener ends such a connection.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

Handler = Callable[[int], object]  # Is given the events of its descriptor.
READ, WRITE = select.EPOLLIN, select.EPOLLOUT
# A thread that is late by more than that has stood still, as all do whose job is suspended.
LATE_SECONDS = 1.0


class Timer:
    """One call at a time to come."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function: Callable[[], None] | None = function

    def cancel(self) -> None:
        """Take the call back; without effect once it was made."""
        self.function = None


class _Event:
    """A descriptor that ends a sleep. It is closed with the last reference to it.

    So its number belongs to no other file while a thread still writes to it, which no lock has to
    ensure: signal handlers write, too.
    """

    def __init__(self) -> None:
        self.number = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # So many others have done so.
            os.eventfd_write(self.number, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.number)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # There was no descriptor left to be had.
            os.close(self.number)


class AwakeClock:
    """The time in which a thread could have heard others: by it somebody is silent.

    Where a whole job is suspended, all of it stands still, and nobody is silent meanwhile.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        # What counts until a moment, the moment, and the most that counts of the time since then:
        # one value, which other threads may read.
        self._counted = 0.0, now(), LATE_SECONDS

    def seconds(self) -> float:
        """Return for how long the thread was awake, or slept as it meant to, since any moment."""
        counted, until, most = self._counted
        return counted + min(self._now() - until, most)

    def expect(self, seconds: float | None) -> None:
        """Take note that the thread sleeps for at most so long, or, for 0, that it runs."""
        most = math.inf if seconds is None else seconds + LATE_SECONDS
        self._counted = self.seconds(), self._now(), most


class Loop:
    """The descriptors and timers of one thread; others may use `post`, `wake` and the timers.

    Whatever decides about connections takes its time, its timers and its sockets from here, so that
    a simulated world can give others.

    After a fork the child calls `close` before it closes what the loop watches: it shares the epoll
    with its parent, whose descriptors must stay watched.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = itertools.count()  # Orders the timers of one moment.
        self._posted: deque[Callable[[], object]] = deque()
        self._thread = threading.get_ident()  # That called `run_once` last.
        self._sleeps = False  # While that waits, or is about to.
        self._awake = AwakeClock(self.now)
        self.awake_seconds = self._awake.seconds
        self._wakeup: _Event | None = _Event()  # None: the loop was closed.
        self.watch(self._wakeup.number, READ, self._run_posted)

    def now(self) -> float:
        """Return the time in seconds; only differences mean something."""
        return time.monotonic()

    def new_socket(self, family: int) -> socket.socket:
        """Return a socket for a connection, which does not block. Raises `OSError`."""
        return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)

    def run_once(self, timeout: float | None = None) -> bool:
        """Sleep until something occurs, at most `timeout` seconds (None: no limit), and handle it.

        Returns whether a handler of a descriptor was called. A timer that is due ends the sleep.
        """
        self._thread = threading.get_ident()
        self._sleeps = True
        if self._timers:
            left = max(0.0, self._timers[0][0] - self.now())
            timeout = left if timeout is None else min(timeout, left)
        self._awake.expect(timeout)
        try:
            ready = self._epoll.poll(timeout)
        finally:
            self._sleeps = False
            self._awake.expect(0.0)
        for descriptor, events in ready:
            handler = self._handlers.get(descriptor)
            if handler is not None:  # Another handler may have closed it meanwhile.
                handler(events)
        while self._timers and self._timers[0][0] <= self.now():
            function = heapq.heappop(self._timers)[2].function
            if function is not None:
                function()
        return bool(ready)

    # -- descriptors

    def fileno(self) -> int:
        """Return a descriptor that can be read when a handler would be called."""
        return self._epoll.fileno()

    def watch(self, descriptor: int, events: int, handler: Handler) -> None:
        """Call `handler` when one of `events` occurs from now on; instead of any handler before."""
        known = descriptor in self._handlers
        self._handlers[descriptor] = handler
        if known:
            self._epoll.modify(descriptor, events)
        else:
            self._epoll.register(descriptor, events)

    def forget(self, descriptor: int) -> None:
        """Stop to watch `descriptor`, before it is closed. Without effect if it is not watched."""
        if self._handlers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    # -- timers

    def call_at(self, when: float, function: Callable[[], None]) -> Timer:
        """Call `function` once, in the first `run_once` from `when` on (see `now`)."""
        timer = Timer(function)
        heapq.heappush(self._timers, (when, next(self._count), timer))
        # A signal handler of the loop's own thread may interrupt its sleep, which then goes on.
        # `run_once` sets both fields before it looks at the timers, and here it is the other way
        # round: either it has seen this timer, or it is woken.
        if self._sleeps or threading.get_ident() != self._thread:
            self.wake()
        return timer

    def call_after(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Call `function` once, in the first `run_once` that begins or sleeps then."""
        return self.call_at(self.now() + seconds, function)

    # -- other threads

    def post(self, function: Callable[[], object]) -> None:
        """Have the loop call `function` soon. Other threads, and signal handlers, may do that."""
        self._posted.append(function)
        self.wake()

    def wake(self) -> None:
        """End the sleep of the loop, from any thread; without effect on one that was closed."""
        wakeup = self._wakeup
        if wakeup is not None:
            wakeup.set()

    def _run_posted(self, _events: int) -> None:
        if self._wakeup is not None:
            self._wakeup.clear()
        try:
            for _ in range(len(self._posted)):  # What these post waits for the next turn.
                self._posted.popleft()()
        finally:
            if self._posted:  # One has raised, and the others are due all the same.
                self.wake()

    def close(self) -> None:
        """Close the epoll; idempotent. The watched descriptors stay open."""
        self._handlers.clear()
        self._timers.clear()
        self._epoll.close()
        self._wakeup = None


# What has descriptors and a thread for the life of the process: after a fork the child closes its
# copies, which would hide the end of the parent, with `after_fork_in_child`.
lasting: weakref.WeakSet[Any] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for each in list(lasting):
        each.after_fork_in_child()
    lasting.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def readable(descriptor: int, seconds: float = 0.0) -> bool:
    """Return whether something can be read, after at most `seconds`."""
    poll = select.poll()  # select() knows no descriptor above 1023.
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
