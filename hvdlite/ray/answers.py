"""What the ranks have answered: results in rank order, or the failure that caused the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.launcher.processes.error_text import shorten

LOOK_SECONDS = 0.1  # how often the driver looks for what rank 0 has logged
# Ranks that only tell of another one's failure wait so long for that one to tell its own.
CAUSE_SECONDS = 0.5


def collect(
    references: Sequence[Any], queue: Any = None, callbacks: Sequence[Callable[[Any], Any]] = ()
) -> list[Any]:
    """Return the results of `references`, one a rank; raises what `RayExecutor.run` does."""
    import ray

    ranks = {reference: rank for rank, reference in enumerate(references)}
    waiting = list(references)
    victims: dict[int, BaseException] = {}
    give_up = float("inf")
    while waiting and time.monotonic() < give_up:
        limit = LOOK_SECONDS if callbacks or victims else None
        done, waiting = ray.wait(waiting, timeout=limit)
        call_back(queue, callbacks)
        for reference in done:
            error = _failure(reference, ranks[reference])
            if error is None:
                continue
            if not isinstance(error, HorovodInternalError) or isinstance(
                error.__cause__, ray.exceptions.RayActorError
            ):
                raise error
            victims[ranks[reference]] = error
            give_up = min(give_up, time.monotonic() + CAUSE_SECONDS)
    if victims:
        raise victims[min(victims)]
    call_back(queue, callbacks)
    return list(ray.get(list(references)))


def _failure(reference: Any, rank: int) -> BaseException | None:
    """Return the exception of a rank that has ended, or None."""
    import ray

    try:
        ray.get(reference)
    except ray.exceptions.RayActorError as error:
        reason = shorten(str(error).strip().rpartition("\n")[2])
        lost = HorovodInternalError(f"rank {rank} is lost, its Ray actor has died: {reason}", rank)
        lost.__cause__ = error
        return lost
    except Exception as error:
        if hasattr(error, "add_note"):
            error.add_note(f"(raised on rank {rank})")
        return error
    return None


def call_back(queue: Any, callbacks: Sequence[Callable[[Any], Any]]) -> None:
    """Call `callbacks` with what rank 0 has logged since."""
    while callbacks and (number := queue.qsize()):
        for logged in queue.get_nowait_batch(number):
            for callback in callbacks:
                callback(logged)
