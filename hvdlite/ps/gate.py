"""What holds the pushes of a table back while servers come or go (see `scaling`)."""

from __future__ import annotations

import threading
from collections.abc import Callable

LOOK_SECONDS = 0.2  # How often a thread that is held back looks whether a server is lost.


class Gate:
    """A gate before the pushes of a table; `clock` says the next step, where all are answered."""

    def __init__(self, clock: Callable[[], int], failed: Callable[[], bool]) -> None:
        self._clock, self._failed = clock, failed
        self._changed = threading.Condition()
        self._unanswered = 0
        self._step = -1  # Of the push that has passed last.
        self._border: int | None = None  # The first step that may not pass; None: all may.
        self._on_quiet: Callable[[int], None] | None = None

    def let_pass(self) -> None:
        """Wait until the next push may be sent, to all servers.

        It is let pass, too, where it can only fail.
        """
        with self._changed:
            while self._border is not None and self._next() >= self._border and not self._failed():
                self._changed.wait(LOOK_SECONDS)
            self._step = self._next()
            self._unanswered += 1

    def _next(self) -> int:
        return self._step + 1 if self._unanswered else self._clock()

    def answered(self) -> None:
        """Take note that a push was answered by all servers."""
        with self._changed:
            self._unanswered -= 1
            self._tell_if_quiet()

    def _tell_if_quiet(self) -> None:
        if not self._unanswered and self._on_quiet is not None:
            on_quiet, self._on_quiet = self._on_quiet, None
            on_quiet(self._clock())

    def close(self, on_quiet: Callable[[int], None]) -> None:
        """Let nothing pass; `on_quiet` gets the next step as soon as all pushes are answered."""
        with self._changed:
            self._border, self._on_quiet = -1, on_quiet
            self._tell_if_quiet()

    def set_border(self, step: int) -> None:
        """Let the steps before this one pass."""
        with self._changed:
            self._border = step
            self._changed.notify_all()

    def open(self) -> None:
        """Let all pass."""
        with self._changed:
            self._border = self._on_quiet = None
            self._changed.notify_all()
