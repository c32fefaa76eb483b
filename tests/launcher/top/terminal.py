"""Programs that tests run on a terminal."""

from __future__ import annotations

import fcntl
import os
import re
import select
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from tests.forks import forks
from tests.launcher.live.test_table import CODES
from tests.parallel.jobs import environment


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, words: list[str], forked: Sequence[str], **variables: str) -> None:
        self.ours, theirs = os.openpty()
        termios.tcsetwinsize(theirs, (40, 120)) if hasattr(termios, "tcsetwinsize") else None
        self.usual = termios.tcgetattr(theirs)
        popen = forks(*forked) if forked else subprocess.Popen
        self.process = popen(
            words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(**variables),
            preexec_fn=take_terminal,  # It makes system calls.
        )  # fmt: skip
        self.theirs = theirs
        self.text = ""

    def press(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def wait_for(self, pattern: str, seconds: float = 40.0) -> str:
        """Return what was shown until the pattern was, and forget it."""
        end = time.monotonic() + seconds
        while True:
            plain = CODES.sub("", self.text)
            if found := re.search(pattern, plain):
                self.text = ""
                return plain[: found.end()]
            assert time.monotonic() < end, plain[-3000:]
            has_ended = self.process.poll() is not None
            if select.select([self.ours], [], [], 0 if has_ended else 1.0)[0]:
                self.text += os.read(self.ours, 1 << 16).decode(errors="replace")
            else:
                assert not has_ended, plain[-3000:]

    def wait(self, seconds: float = 20.0) -> int:
        """Return the exit code of the program, which waits while nobody reads what it draws."""
        end = time.monotonic() + seconds
        while self.process.poll() is None or select.select([self.ours], [], [], 0)[0]:
            assert time.monotonic() < end, CODES.sub("", self.text)[-3000:]
            if select.select([self.ours], [], [], 0.1)[0]:
                with suppress(OSError):  # It has ended.
                    self.text += os.read(self.ours, 1 << 16).decode(errors="replace")
        return self.process.returncode

    def is_usual(self) -> bool:
        return termios.tcgetattr(self.theirs)[3] == self.usual[3]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


def take_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def terminal(words: list[str], forked: Sequence[str] = (), **variables: str) -> Iterator[Terminal]:
    """Run a program; `forked` as in `tests.launcher.jobs.start`."""
    one = Terminal(words, forked, **variables)
    try:
        yield one
    finally:
        one.close()
