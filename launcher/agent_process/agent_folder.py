"""The private folder of an agent: a meeting place, what ranks report, and files for them.

Only the user may enter it. It goes with the agent.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from typing import BinaryIO

READ_BYTES = 1 << 16
LIVE = "live"
EVENTS = ("raised", "stall", "answer", LIVE)
# The path of a Unix socket may have 107 bytes, and its name here has 8.
LONGEST_PATH = 95


class AgentFolder:
    """A folder in TMPDIR, or in /tmp where that has too long a name for sockets in it."""

    def __init__(self) -> None:
        name = f"hvdlite-agent-{os.getpid()}-{os.urandom(6).hex()}"
        base = os.environ.get("TMPDIR") or "/tmp"
        if len(os.fsencode(f"{base}/{name}")) > LONGEST_PATH or not os.access(base, os.W_OK):
            base = "/tmp"
        self.path = os.path.join(base, name)
        os.mkdir(self.path, 0o700)
        os.mkfifo(self.events, 0o600)
        # Open for writing, too: then it does not end when a writer leaves.
        self.events_fd = os.open(self.events, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._unended = b""
        self._answers: deque[int] = deque()
        self._answer: BinaryIO | None = None  # Of the first one.

    @property
    def events(self) -> str:
        """The named pipe in which ranks say what occurs, and what they count."""
        return os.path.join(self.path, "events")

    @property
    def socket(self) -> str:
        """The Unix socket at which the ranks meet."""
        return os.path.join(self.path, "meeting")

    def said(self) -> Iterator[tuple[str, int, str]]:
        """Yield what ranks have said since the last time: the event, the rank, and a text."""
        try:
            data = os.read(self.events_fd, READ_BYTES)
        except BlockingIOError:
            return
        *lines, self._unended = (self._unended + data).split(b"\n")
        for line in lines:
            words = line.decode(errors="replace").split(" ", 3)  # token, event, rank, text
            if len(words) == 4 and words[1] in EVENTS and words[2].isdecimal():
                yield words[1], int(words[2]), words[3]

    # -- files from the launcher, and answers to it

    def append(self, name: str, data: bytes) -> None:
        with open(os.path.join(self.path, os.path.basename(name)), "ab") as file:
            file.write(data)

    def link(self, directory: str) -> None:
        """Let the files of `directory`, which may be large, appear here."""
        for entry in os.scandir(directory):
            os.symlink(entry.path, os.path.join(self.path, entry.name))

    def begin_answer(self, number: int) -> None:
        """Let `next_answer_part` give what the process `number` has left, and its end."""
        self._answers.append(number)

    def next_answer_part(self, most_bytes: int) -> tuple[int | None, bytes]:
        """Return the next part of an answer and whose it is; no bytes at its end."""
        if not self._answers:
            return None, b""
        number = self._answers[0]
        path = os.path.join(self.path, f"answer.{number}.pickle")
        if self._answer is None:
            with contextlib.suppress(FileNotFoundError):
                self._answer = open(path, "rb")  # noqa: SIM115 - it is read in parts
        part = self._answer.read(most_bytes) if self._answer else b""
        if not part:
            self._answers.popleft()
            if self._answer is not None:
                self._answer.close()
                self._answer = None
                os.unlink(path)
        return number, part

    def remove(self) -> None:
        os.close(self.events_fd)
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.path):
                if entry.is_dir(follow_symlinks=False):
                    import shutil  # what a rank has put here, as its home

                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)
            os.rmdir(self.path)
