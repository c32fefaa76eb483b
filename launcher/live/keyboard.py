"""Keys of a terminal, one at a time, while this process is in its foreground.

The terminal gives lines to programs. Here it gives each key (cbreak); Ctrl-C and Ctrl-Z remain
signals. It is as before when this process ends, in whichever way it can act on, and while it is
suspended.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable
from typing import Any

from hvdlite.launcher.processes.event_loop import EventLoop

READ_BYTES = 1024
UP, DOWN, ENTER, ESCAPE, ERASE, ERASE_ALL = "up", "down", "enter", "escape", "erase", "erase all"
SEQUENCES = {
    "\x1b[A": UP, "\x1b[B": DOWN, "\x1bOA": UP, "\x1bOB": DOWN, "\x1b": ESCAPE, "\r": ENTER,
    "\n": ENTER, "\x7f": ERASE, "\b": ERASE,
    "\x15": ERASE_ALL,
}  # fmt: skip
# Those by which the kernel stops a process that reads from a terminal in the background, or sets
# it, as nobody may stop a training who types a command to a shell.
STOPS = (signal.SIGTTIN, signal.SIGTTOU)


def keys_in(text: str) -> list[str]:
    """Return the keys of what a terminal has sent; sequences that mean nothing here are skipped."""
    keys = []
    while text:
        found = next((each for each in SEQUENCES if text.startswith(each)), None)
        if found == "\x1b" and text[1:2] in ("[", "O") and len(text) > 2:
            end = next((n for n, each in enumerate(text[2:], 2) if "@" <= each <= "~"), len(text))
            text = text[end + 1 :]
            continue
        if found is not None:
            keys.append(SEQUENCES[found])
            text = text[len(found) :]
        else:
            if text[0].isprintable():
                keys.append(text[0])
            text = text[1:]
    return keys


class Keyboard:
    """Calls ``pressed(key)`` in the loop, while this process is in the foreground.

    `back` is called when that begins, and `left` before a suspension. Of two kinds of processes,
    one `goes_on` in the background; the other is stopped there, as is usual for one that draws on
    the whole terminal, and `left` is called before.
    """

    def __init__(
        self, loop: EventLoop, pressed: Callable[[str], None], *,
        left: Callable[[], None] = lambda: None, back: Callable[[], None] = lambda: None,
        goes_on: bool = True,
    ) -> None:  # fmt: skip
        self._loop, self._pressed, self._left, self._back = loop, pressed, left, back
        self._goes_on = goes_on
        self._fd = -1
        self._saved: list[Any] | None = None  # How the terminal is where it gives lines.
        self._active = False
        self._previous: dict[signal.Signals, Any] = {}

    def start(self) -> bool:
        """Begin; return whether there are keys: standard input is the terminal of this session."""
        if threading.current_thread() is not threading.main_thread():
            return False
        try:
            self._fd = sys.stdin.fileno()
            os.tcgetpgrp(self._fd)
        except (OSError, ValueError, AttributeError):
            self._fd = -1
            return False
        if self._goes_on:
            for number in STOPS:
                self._previous[number] = signal.signal(number, signal.SIG_IGN)
        # In the loop, as what has been interrupted may be drawing.
        suspend = lambda *_: self._loop.post(self._suspend)  # noqa: E731
        for number, handler in ((signal.SIGTSTP, suspend), (signal.SIGQUIT, self._quit)):
            if signal.getsignal(number) is signal.SIG_DFL:
                self._previous[number] = signal.signal(number, handler)
        atexit.register(self.close)
        self.look()
        return True

    @property
    def lost(self) -> bool:
        """Whether the terminal is gone."""
        return self._fd < 0

    def look(self) -> None:
        """Look, now and then, whether this process has come to the foreground, or left it."""
        if not self._is_here():
            self._forget()  # What the terminal is like is another program's affair.
            if self.lost or self._goes_on:
                return
            self._left()
            os.killpg(os.getpgrp(), signal.SIGTTOU)
            # From here on it goes on again; a group that no shell watches has not been stopped.
            if not self._is_here():
                return
        if self._active:
            return
        with contextlib.suppress(termios.error):
            found = termios.tcgetattr(self._fd)
            # Before, the terminal may have been as another program needs it, such as a shell that
            # reads a command.
            if self._saved is None or found[3] & termios.ICANON:
                self._saved = found
            tty.setcbreak(self._fd, termios.TCSANOW)
            self._loop.listen(self._fd, self._read)
            self._active = True
        if self._active:
            self._back()

    def _is_here(self) -> bool:
        try:
            return self._fd >= 0 and os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            self._forget()
            self._fd = -1
            return False

    def _forget(self) -> None:
        if self._active:
            self._loop.forget(self._fd)
            self._active = False

    def _read(self, fd: int) -> None:
        self.look()
        if not self._active:
            return
        try:
            data = os.read(fd, READ_BYTES)
        except OSError:
            data = b""
        if not data:  # The terminal is gone.
            self._forget()
            self._fd = -1
            return
        for key in keys_in(data.decode(errors="replace")):
            self._pressed(key)

    def _restore(self) -> None:
        if self._active and self._saved is not None and self._is_here():
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._saved)
        self._forget()

    def _suspend(self) -> None:
        self._restore()
        self._left()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # From here on it goes on again.
        signal.signal(signal.SIGTSTP, handler)
        self.look()

    def _quit(self, number: int, _frame: object) -> None:
        self._restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def close(self) -> None:
        """Leave the terminal as it was; idempotent."""
        self._restore()
        self._fd = -1
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        atexit.unregister(self.close)
