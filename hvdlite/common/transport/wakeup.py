"""What ends a sleep in poll() from another thread: at once, or after a time.

Both system calls are made without letting the GIL go: whoever rings is about to go on, and the
thread that is woken would take the GIL from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)


class _Time(ctypes.Structure):
    """``struct itimerspec`` of the C library: an interval, and the time to the first end."""

    _fields_ = (
        ("interval_seconds", ctypes.c_long),
        ("interval_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


class WakeUp:
    """Two descriptors for poll(), readable when the alarm has rung."""

    def __init__(self) -> None:
        # Guards the descriptors, as their numbers may be others' soon. Reentrant: a signal handler
        # may ring while its thread rings.
        self._lock = threading.RLock()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Its flags have the same values as those of files.
        self._timer = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
        if self._timer < 0:
            number = ctypes.get_errno()
            os.close(self._event)
            raise OSError(number, os.strerror(number))
        self._set = False  # the timer
        self.descriptors = frozenset((self._event, self._timer))

    def trigger(self, within: float = 0.0) -> None:
        """Ring now, or in `within` seconds. After `close` it is no error."""
        with self._lock:
            if self._event < 0:
                return
            if within > 0:
                self._set = True
                _libc.timerfd_settime(self._timer, 0, ctypes.byref(_after(within)), None)
            else:
                _libc.eventfd_write(self._event, 1)

    def clear(self) -> None:
        """It has been heard: forget all rings, also those to come."""
        with self._lock:
            if self._event < 0:
                return
            if self._set:
                self._set = False
                _libc.timerfd_settime(self._timer, 0, ctypes.byref(_NEVER), None)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event)

    def close(self) -> None:
        """Close both, once."""
        with self._lock:
            if self._event >= 0:
                os.close(self._event)
                os.close(self._timer)
                self._event = self._timer = -1

    def after_fork_in_child(self) -> None:
        """Close this process's copies."""
        self._lock = threading.RLock()  # a thread that is not in the child may hold the old one
        self.close()


def _after(seconds: float) -> _Time:
    whole, rest = divmod(max(1, int(seconds * 1e9)), 10**9)
    return _Time(0, 0, whole, rest)


_NEVER = _Time(0, 0, 0, 0)
