"""Signals to the launcher, as something that a selector can wait for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from hvdlite.launcher.decisions.endings import REPEATED

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1


class SignalInbox:
    """Within it, signals are noted instead of acted on. Outside the main thread it notes none."""

    def __init__(self) -> None:
        self.received: int | None = None  # the first
        self._waiting: list[int] = []
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_fd = -1

    def fileno(self) -> int:
        """Becomes readable when a signal comes."""
        return self._reader.fileno()

    def drain(self, _fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(512)

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is threading.main_thread():
            for number in HANDLED:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                    self._previous[number] = signal.signal(number, self._note)
            self._previous_fd = signal.set_wakeup_fd(
                self._writer.fileno(), warn_on_full_buffer=False
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._previous_fd)
            for number, handler in self._previous.items():
                signal.signal(number, handler)
        self._reader.close()
        self._writer.close()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._waiting.append(REPEATED if self.received is not None else number)
        self.received = self.received or number

    def note_broken_pipe(self) -> None:
        """Nobody reads our output any more: as if SIGPIPE had come."""
        if self.received is None:
            self._note(signal.SIGPIPE, None)

    def take(self) -> int | None:
        """Return the next signal that was not handled yet; `REPEATED` for all after the first."""
        return self._waiting.pop(0) if self._waiting else None


@contextlib.contextmanager
def interrupt_waits() -> Iterator[None]:
    """Let a SIGINT that comes meanwhile raise `KeyboardInterrupt` afterwards.

    Python ignores what the handler of a signal raises inside a fork. A process that is started here
    keeps SIGINT blocked.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signal_group(group: int, number: int) -> None:
    """Signal a process group; one that has ended does no harm."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def die_with_parent(number: signal.Signals) -> Callable[[], None]:
    """For Popen's preexec_fn: the child gets this signal when the launcher is killed."""
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork
    return lambda: prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
