"""Follows what hvdlite-run says of a job of slowed_training.py."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO

from tests.limits import HANG_SECONDS

LOOKS = 6  # Of hasty.py: a cause is told when so many in a row say the same.


class Followed:
    """A job whose ranks read from `file` by what some of them are slowed."""

    def __init__(self, process: subprocess.Popen[str], file: Path) -> None:
        """Wait until the ranks make steps."""
        self._file = file
        self._lines: queue.Queue[str] = queue.Queue()
        self._last: deque[str] = deque(maxlen=3 * LOOKS)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()
        self._wait("slowed by")

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line.strip())

    def _next(self, end: float) -> str:
        try:
            line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise AssertionError("\n".join(self._last)) from None
        self._last.append(line)
        return line

    def _wait(self, text: str) -> None:
        end = time.monotonic() + HANG_SECONDS
        while text not in self._next(end):
            pass

    def slow_down(self, reason: str) -> None:
        """Have ranks be slow for a reason, and wait until they are."""
        new = self._file.with_suffix(".new")
        new.write_text(reason)
        os.replace(new, self._file)
        if reason != "end":
            self._wait(f"slowed by {reason}".strip())

    def must_say(self, pattern: str) -> None:
        """Wait until hvdlite-run says at each look what `pattern` matches."""
        end, right = time.monotonic() + HANG_SECONDS, 0
        while right < LOOKS:
            line = self._next(end)
            if "wait" in line:
                right = right + 1 if re.fullmatch(f"hvdlite-run: {pattern}", line) else 0
