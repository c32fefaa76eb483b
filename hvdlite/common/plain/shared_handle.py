"""A handle that several entries share, which are waited for together."""

from __future__ import annotations

from typing import Any

from hvdlite.common.plain.handles import Event, Handle


class SharedHandle(Handle):
    """The result of `count` entries: there when the last of them has ended.

    The engine completes or fails it once for each entry; waiting threads raise the first error.
    """

    __slots__ = ("_first", "_last", "_left")

    def __init__(self, count: int) -> None:
        super().__init__()
        self._left = count
        self._first: Exception | None = None
        self._last: Event | None = None

    def complete(self, value: Any = None, event: Event | None = None) -> None:
        """Count an entry that has run; the event of the last one is the last to occur."""
        self._last = event
        self._left -= 1
        if self._left == 0:
            self._finish()

    def fail(self, error: Exception) -> None:
        """Count an entry that has failed."""
        self._first = self._first or error
        self._left -= 1
        if self._left == 0:
            self._finish()

    def _finish(self) -> None:
        if self._first is None:
            super().complete(event=self._last)
        else:
            super().fail(self._first)
