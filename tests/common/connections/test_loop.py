"""The loop that waits for descriptors, timers and other threads."""

from __future__ import annotations

import os

import pytest

from hvdlite.common.connections.loop import READ, Loop, readable


def test_calls_for_a_loop_that_has_ended_are_without_effect() -> None:
    loop = Loop()
    made: list[str] = []
    loop.close()
    loop.post(lambda: made.append("posted"))
    loop.wake()
    assert not made


def test_a_loop_that_closes_while_it_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wake is between its look at the descriptor and the write: nobody else gets its number."""
    loop, write = Loop(), os.eventfd_write
    others: list[int] = []

    def late(descriptor: int, value: int) -> None:
        loop.close()
        others.extend(os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))
        write(descriptor, value)

    monkeypatch.setattr(os, "eventfd_write", late)
    before = len(os.listdir("/proc/self/fd"))
    loop.wake()
    assert len(os.listdir("/proc/self/fd")) == before, "epoll and eventfd are closed"
    assert not any(map(readable, others))
    for each in others:
        os.close(each)


def test_what_was_not_handled_for_an_exception_is_due_in_the_next_turn() -> None:
    loop, done = Loop(), list[str]()

    def handle(descriptor: int, what: str) -> None:
        loop.forget(descriptor)
        done.append(what)
        if len(done) == 1:
            raise ValueError("a fault")

    events = [os.eventfd(1) for _ in range(2)]
    for each in events:
        loop.watch(each, READ, lambda _, each=each: handle(each, "event"))  # type: ignore[misc]
    loop.call_after(0.0, lambda: done.append("timer"))
    with pytest.raises(ValueError, match="a fault"):
        loop.run_once(0.0)
    assert done == ["event"]
    loop.run_once(0.0)
    assert done == ["event", "event", "timer"]
    loop.close()
    for each in events:
        os.close(each)
