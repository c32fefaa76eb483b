"""Handles that serve the next collective, while the engine still ends the last one."""

from __future__ import annotations

import re
import signal
import threading
from typing import Any

import pytest

from hvdlite.common.base.errors import (
    ConfigError,
    HorovodInternalError,
    HorovodVersionMismatchError,
)
from hvdlite.common.requests.handles import Handle, HandleTable

pytestmark = pytest.mark.timeout(120)


def test_a_handle_that_is_renewed_while_it_ends_waits_for_its_next_end() -> None:
    """The thread that waits has seen the end, and renews, before the engine has told all of it."""
    handle, called = Handle(), []

    def overtake() -> None:
        assert handle.poll()
        handle.renew()
        handle.on_end(lambda: called.append(1))

    handle.on_end(overtake)
    handle.complete("first")
    assert not handle.poll() and not called
    assert not handle.ended_within(0)
    handle.complete("second")
    assert handle.wait() == "second" and called == [1]


def test_all_threads_that_wait_wake_with_the_result_in_every_round() -> None:
    """Some wait without a limit, and some look in between whether it is there."""
    handle, results = Handle(), []
    threads, rounds = 4, 200
    barrier = threading.Barrier(threads + 1, timeout=30)

    def wait(limited: bool) -> None:
        for _ in range(rounds):
            barrier.wait()
            while limited and not handle.ended_within(1e-5):
                pass
            results.append(handle.wait())
            barrier.wait()

    waiting = [
        threading.Thread(target=wait, args=(number % 2 == 1,), daemon=True)
        for number in range(threads)
    ]
    for thread in waiting:
        thread.start()
    for number in range(rounds):
        barrier.wait()
        handle.complete(number)
        barrier.wait()
        handle.renew()
    for thread in waiting:
        thread.join(30)
    assert results == [number for number in range(rounds) for _ in range(threads)]


@pytest.mark.timeout(10)
def test_an_end_between_the_last_look_and_the_sleep_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle, make_lock = Handle(), threading.Lock

    def end_meanwhile() -> Any:
        handle.complete("there")
        return make_lock()

    with monkeypatch.context() as patched:
        patched.setattr(threading, "Lock", end_meanwhile)
        assert handle.wait() == "there"


def test_waits_that_end_in_vain_leave_nothing_behind() -> None:
    handle = Handle()
    for _ in range(100):
        assert not handle.ended_within(0)
    assert handle._callbacks == []


def test_a_signal_handler_waits_for_what_its_thread_waits_for() -> None:
    handle, results = Handle(), []

    def on_signal(number: int, frame: Any) -> None:
        ending = threading.Thread(target=handle.complete, args=("there",))
        ending.start()
        results.append(handle.wait())
        ending.join(30)

    before = signal.signal(signal.SIGUSR1, on_signal)
    try:
        main = threading.main_thread().ident
        assert main is not None
        interrupting = threading.Thread(target=signal.pthread_kill, args=(main, signal.SIGUSR1))
        interrupting.start()
        results.append(handle.wait())
        interrupting.join(30)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert results == ["there", "there"]


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


def test_a_number_of_before_a_shutdown_names_no_new_operation() -> None:
    first, second = HandleTable(), HandleTable()
    number = first.add("old")
    assert second.add("new") != number
    with pytest.raises(ValueError, match=f"handle {number} was not created"):
        second.get(number)
