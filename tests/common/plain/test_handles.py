"""Handles that serve the next collective, while the engine still ends the last one."""

from __future__ import annotations

import threading
from typing import Any

from hvdlite.common.plain.handles import Handle


class Gate:
    """A lock that does something before it is released."""

    def __init__(self, lock: threading.Lock, first: Any) -> None:
        self._lock, self._first = lock, first

    def release(self) -> None:
        self._first()
        self._lock.release()


def test_a_handle_that_is_renewed_while_it_ends_waits_for_its_next_end() -> None:
    """The thread that waits has seen the end, and renews, before the engine has told all of it."""
    handle, called = Handle(), []

    def overtake() -> None:
        assert handle.poll()
        handle.renew()
        handle.on_end(lambda: called.append(1))

    handle._gate = Gate(handle._gate, overtake)  # type: ignore[assignment]
    handle.complete("first")
    assert not handle.poll() and not called
    assert not handle.ended_within(0)
    handle.complete("second")
    assert handle.wait() == "second" and called == [1]


def test_a_renewed_handle_knows_no_error() -> None:
    handle = Handle()
    handle.fail(ValueError("wrong"))
    handle.renew()
    handle.complete()
    assert handle.wait() is None and handle.error is None
