"""The whole terminal, on which one job is drawn, or a list of jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# The alternate screen without a cursor, so that the terminal is as before at the end.
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
COLUMNS, LINES = 80, 24  # Where a terminal does not know its size.


class Screen:
    """Draws on standard output."""

    def __init__(self) -> None:
        self._entered = False

    def enter(self) -> None:
        """Take the terminal; idempotent."""
        if not self._entered:
            self._entered = True
            self._write(ENTER)

    def leave(self) -> None:
        """Give it back; idempotent."""
        if self._entered:
            self._entered = False
            self._write(LEAVE)

    def size(self) -> tuple[int, int]:
        """Return columns and lines."""
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
        return columns or COLUMNS, lines or LINES

    def draw(self, lines: Sequence[str]) -> None:
        """Show lines, which must fit, in the place of those before; nothing while it is left."""
        if not self._entered:
            return
        body = "\r\n".join(line + CLEAR_LINE for line in lines)
        self._write(f"{HOME}{body}{CLEAR_BELOW}")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
