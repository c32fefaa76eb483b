"""Helpers for tests of short calls, whose ranks are threads."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any

import numpy as np

import hvdlite.numpy as hvd
from hvdlite.common.engine.short_calls import ShortCalls
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from tests.limits import patient

LIMIT_SECONDS = patient(20)
# Nothing that a thread is about to wait for is reported before, also on a machine that is busy.
GATHER = Config(cycle_time_ms=60_000)


def short_calls() -> ShortCalls:
    """The short calls of this rank."""
    found = current().engine._short_calls
    assert found is not None
    return found


def was_short(call: Callable[[], Any]) -> Any:
    """What a call returns; it must have been a short one."""
    before = short_calls().completed
    result = call()
    assert short_calls().completed == before + 1
    return result


def until(condition: Callable[[], object]) -> None:
    """Return when the condition holds."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it has not come to that"
        time.sleep(0.001)


def begin() -> None:
    """Return when all ranks take part in short calls, as they do after `hvd.init`."""
    hvd.barrier()


def by_the_data_plane(
    tensor: Any, start: Callable[..., int] = hvd.allreduce_async, **options: Any
) -> Any:
    """The result for a thread that does not wait, and so takes the way through the engine."""
    before = short_calls().completed
    handle = start(tensor, **options)
    current().engine._inbox.hurry()
    until(lambda: hvd.poll(handle))
    assert short_calls().completed == before
    return hvd.synchronize(handle)


def somebody_waits(rank_0: Any) -> bool:
    """Whether the coordinator knows of a tensor that some ranks have not reported."""
    return rank_0.engine._control_plane._coordinator.oldest is not None


def somebody_has_arrived(rank_0: Any) -> bool:
    """Whether a rank waits at a slot for the others."""
    board = rank_0.transport.short_call_memory(0)
    words = board[2048 : 2048 + 64 * 17].view(np.uint64)[::8]  # of the slots
    return bool(np.any(words >> np.uint64(9) & np.uint64(511)))


def interrupted_after(
    place: Any, method: str, points: int, modules: Sequence[ModuleType], call: Callable[[], Any]
) -> bool:
    """Make a call, and raise KeyboardInterrupt in it, at a point after `place` has run `method`.

    Point 0 is where that returns; more are counted where the interpreter may raise it, in some
    modules. Return whether there are so many.
    """
    left, is_armed = points, False
    names = [each.__name__ for each in modules]
    run = getattr(place, method)

    def trace(frame: FrameType, event: str, _: object) -> None:
        nonlocal left, is_armed
        if not is_armed or frame.f_globals["__name__"] not in names:
            return
        left -= event in ("call", "c_return")
        if left == 0:
            is_armed = False
            raise KeyboardInterrupt

    def run_and_arm(*args: Any) -> None:
        nonlocal is_armed
        run(*args)
        if not points:
            raise KeyboardInterrupt
        is_armed = True

    setattr(place, method, run_and_arm)
    sys.setprofile(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
        setattr(place, method, run)
    return False
