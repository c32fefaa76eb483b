"""The loop that waits for descriptors, timers and other threads."""

from __future__ import annotations

from hvdlite.common.connections.loop import Loop


def test_calls_for_a_loop_that_has_ended_are_without_effect() -> None:
    loop = Loop()
    made: list[str] = []
    loop.close()
    loop.post(lambda: made.append("posted"))
    loop.wake()
    assert not made
