"""Wake a thread that sleeps in poll() from another thread: at once, or after a time.

Both system calls keep the GIL (`ctypes.PyDLL`): the calling thread is about to continue, and the
woken thread would take the GIL from it.
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
    """``struct itimerspec`` of the C library: an interval, and the time to the first expiry."""

    _fields_ = (
        ("interval_seconds", ctypes.c_long),
        ("interval_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


class WakeUp:
    """Two descriptors for poll(): an eventfd for now, and a timerfd for later."""

    def __init__(self) -> None:
        # Guards the descriptors: after `close`, their numbers may belong to other files. Reentrant,
        # as a signal handler may trigger while its thread triggers.
        self._lock = threading.RLock()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # The flags of timerfd_create have the same values as those of open().
        self._timer = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
        if self._timer < 0:
            code = ctypes.get_errno()
            os.close(self._event)
            raise OSError(code, os.strerror(code))
        self._timer_set = False
        self.descriptors = frozenset((self._event, self._timer))

    def trigger(self, within: float = 0.0) -> None:
        """Wake now, or in `within` seconds. After `close` this has no effect."""
        with self._lock:
            if self._event < 0:
                return
            if within > 0:
                self._timer_set = True
                whole, rest = divmod(max(1, int(within * 1e9)), 10**9)
                after = _Time(0, 0, whole, rest)
                _libc.timerfd_settime(self._timer, 0, ctypes.byref(after), None)
            else:
                _libc.eventfd_write(self._event, 1)

    def clear(self) -> None:
        """Cancel all wake-ups, also those that are scheduled."""
        with self._lock:
            if self._event < 0:
                return
            if self._timer_set:
                self._timer_set = False
                _libc.timerfd_settime(self._timer, 0, ctypes.byref(_NEVER), None)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event)

    def close(self) -> None:
        """Close both descriptors; idempotent."""
        with self._lock:
            if self._event >= 0:
                os.close(self._event)
                os.close(self._timer)
                self._event = self._timer = -1

    def after_fork_in_child(self) -> None:
        """Close this process's copies of the descriptors."""
        # A thread that does not exist in the child may hold the lock.
        self._lock = threading.RLock()
        self.close()


_NEVER = _Time(0, 0, 0, 0)
