"""Handles: the result of one collective, and the table of those that users hold as numbers."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol

from hvdlite.common.base.errors import HorovodInternalError


class Queue(Protocol):
    """What the entry of a handle is in until the engine has taken it."""

    def hurry(self) -> None:
        """Stop gathering entries: a thread waits for one of them."""

    def attend(self, handle: Handle) -> None:
        """Do what completes a handle soonest, in a thread that waits for it without a limit.

        It may return before the result is there.
        """


class Event(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Return whether the work before it is done; never wait."""


class Handle:
    """The result of one collective, which the engine completes or fails once.

    Any thread may wait for it; a waiting thread sleeps.
    """

    __slots__ = ("_callbacks", "_done", "_event", "_value", "error", "queue")

    def __init__(self) -> None:
        self._done = False
        self._value: Any = None
        self.error: Exception | None = None  # Of a collective that has failed.
        # Where the result is still computed by a device: the event after which it is there.
        self._event: Event | None = None
        # Called, and removed, when the result is there. A thread that waits adds one of its own, as
        # most handles have their results before a thread waits for them.
        self._callbacks: list[Callable[[], None]] = []
        # Is told when a thread begins to wait; None before the entry is there.
        self.queue: Queue | None = None

    def complete(self, value: Any = None, event: Event | None = None) -> None:
        """Give the result, which a device has computed when `event` occurs."""
        self._value = value
        self._event = event
        self._end()

    def fail(self, error: Exception) -> None:
        """Give the error that waiting threads raise."""
        self.error = error
        self._end()

    def spoil(self, error: Exception) -> None:
        """Give an error; also after a result, which the device will never compute."""
        if self._done:
            self.error = error
        else:
            self.fail(error)

    def _end(self) -> None:
        # Whoever sees that it is done may renew the handle at once.
        callbacks = self._callbacks
        self._done = True
        if callbacks:
            _call_back(callbacks)

    def renew(self) -> None:
        """Stand for the next collective. Nobody waits for the last one, which has ended."""
        self._callbacks = []
        self._value = self.error = self._event = self.queue = None
        self._done = False

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, now or in the thread that completes the handle.

        The callback must neither wait nor raise.
        """
        self._callbacks.append(callback)
        if self._done:
            _call_back(self._callbacks)
        else:
            self._hurry()

    def _hurry(self) -> None:
        queue = self.queue  # A thread that makes a short call sets it to None meanwhile.
        if queue is not None:
            queue.hurry()

    def poll(self) -> bool:
        """Return whether `wait` would not sleep. Never waits."""
        return self._done

    def is_computed(self) -> bool:
        """Return whether the result, or an error, is there, also on its device. Never waits."""
        return self._done and (self._event is None or self._event.query())

    def ended_within(self, seconds: float) -> bool:
        """Sleep until the result is there, at most `seconds`; return whether it is."""
        if self._done:
            return True
        self._hurry()
        self._sleep(seconds)
        return self._done

    def wait(self) -> Any:
        """Sleep until the result is there, and return it, or raise the error."""
        if not self._done:
            queue = self.queue
            if queue is not None:
                queue.attend(self)
            if not self._done:
                self._sleep()
        if self.error is not None:
            raise _fresh(self.error)
        return self._value

    @classmethod
    def awaited_in(cls, frames: Sequence[FrameType]) -> Handle | None:
        """Return the handle for which a thread sleeps without a limit, by its innermost frames."""
        codes = [frame.f_code for frame in frames[:2]]
        if codes != [cls._sleep.__code__, cls.wait.__code__]:
            return None
        handle: Handle = frames[1].f_locals["self"]
        return handle

    def _sleep(self, seconds: float = -1) -> None:
        gate = threading.Lock()
        gate.acquire()
        callbacks = self._callbacks
        callbacks.append(gate.release)
        if self._done:
            _call_back(callbacks)
        if not gate.acquire(timeout=seconds):
            with suppress(ValueError):  # It may be called right now.
                callbacks.remove(gate.release)


def _call_back(callbacks: list[Callable[[], None]]) -> None:
    while callbacks:
        try:
            callback = callbacks.pop()
        except IndexError:  # The other thread has popped the last one, and calls it.
            return
        callback()


def _fresh(error: Exception) -> Exception:
    """Copy an error to raise it: one may fail many handles, and raising extends a traceback."""
    if isinstance(error, HorovodInternalError):
        fresh = type(error).__new__(type(error), *error.args)
        fresh.__dict__.update(error.__dict__)  # With what a subclass knows besides.
        return fresh
    return copy.copy(error)


# Those of one process, which outlive a shutdown: an old number must not name a new operation.
_numbers = itertools.count()


class HandleTable:
    """The numbers that stand for pending operations in the public API.

    It has no lock, as each method makes one atomic change: a signal handler may use it too.
    """

    def __init__(self) -> None:
        self._pending: dict[int, Any] = {}

    def add(self, operation: Any) -> int:
        """Keep `operation`; return its number, which was never given before."""
        number = next(_numbers)
        self._pending[number] = operation
        return number

    def get(self, number: int) -> Any:
        """Return the operation. Raises `ValueError` when it was taken already, or never given."""
        try:
            return self._pending[number]
        except KeyError:
            raise ValueError(f"handle {number} was not created or has been cleared") from None

    def take(self, number: int) -> Any:
        """Remove and return the operation; None where there is none."""
        return self._pending.pop(number, None)


# A handle that several entries share, which are waited for together.


class SharedHandle(Handle):
    """The result of `count` entries: there when the last of them has ended.

    The engine completes or fails it once for each entry; waiting threads raise the first error.
    """

    __slots__ = ("_first", "_last", "_left")

    def __init__(self, count: int) -> None:
        super().__init__()
        # Counts down in one step, as two threads may end entries at the same time.
        self._left = iter(range(count - 1, -1, -1))
        self._first: Exception | None = None
        self._last: Event | None = None

    def complete(self, value: Any = None, event: Event | None = None) -> None:
        """Count an entry that has run; the event of the last one is the last to occur."""
        self._last = event
        if not next(self._left):
            self._finish()

    def fail(self, error: Exception) -> None:
        self._first = self._first or error
        if not next(self._left):
            self._finish()

    def _finish(self) -> None:
        if self._first is None:
            super().complete(event=self._last)
        else:
            super().fail(self._first)
