"""Handles that serve the next collective, while the engine still ends the last one."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from hvdlite.common.base.errors import (
    ConfigError,
    HorovodInternalError,
    HorovodVersionMismatchError,
)
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


@pytest.mark.parametrize(
    "error",
    [
        HorovodVersionMismatchError("hvdlite", "2", "1"), ConfigError("A=1: give 2"),
        HorovodInternalError("lost", rank=3, job_goes_on=True), OSError(2, "No file", "a name"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_each_wait_raises_an_error_of_its_own_that_knows_the_same(error: Exception) -> None:
    handle = Handle()
    handle.fail(error)
    raised = []
    for _ in range(2):
        with pytest.raises(type(error), match=re.escape(str(error))) as caught:
            handle.wait()
        assert vars(caught.value) == vars(error)
        raised.append(caught.value)
    assert raised[0] is not raised[1]
