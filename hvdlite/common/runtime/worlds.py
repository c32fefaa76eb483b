"""The worlds of an elastic job, for `elastic.run` and its states.

In a job of fixed size these functions work as well: there is no world, no check is interrupted, and
`next_world` starts hvdlite anew with the same ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from hvdlite.common.driver_link.frames import World
from hvdlite.common.runtime import lifecycle
from hvdlite.common.runtime.current import find, this_process

__all__ = [
    "World",
    "check",
    "current_world",
    "elastic",
    "next_world",
    "on_hosts_seen",
    "tell_error",
    "world_is_broken",
]

MOST_TEXT = 500  # Characters of an error that the driver is told.


def elastic() -> bool:
    """Return whether this process is a worker of an elastic job; False before `init`."""
    return this_process.worker is not None


def current_world() -> World | None:
    """Return the world of this worker; None for a newcomer that waits, and without a driver."""
    worker = this_process.worker
    return None if worker is None else worker.world


def next_world(commit: int) -> World | None:
    """Leave the world, and join the next one; blocks until there is one.

    `commit` is the number of the commit that this worker holds, 0 for none. Arguments of `init`,
    process sets and the timeline stay. Raises `SystemExit` where this worker is not needed any
    more, and as `init`. Returns the world, None without a driver.
    """
    worker = this_process.worker
    if worker is not None:
        worker.commit = commit
    lifecycle.restart()
    return current_world()


def check() -> int | None:
    """Return the kind of the change of hosts if all ranks are to be interrupted here, else None.

    The n-th call in a world is the same on all ranks, and returns the same. Costs no message while
    no change is due; waits for the driver's decision otherwise. Raises `HorovodInternalError` where
    the world is over, and `SystemExit` where the job is.
    """
    worker = this_process.worker
    return None if worker is None or worker.world is None else worker.check()


def tell_error(error: Exception) -> None:
    """Tell the driver by which error this worker leaves its world, unless that is broken."""
    worker = this_process.worker
    if worker is not None and worker.world is not None and not world_is_broken():
        worker.link.tell_error(worker.epoch, f"{type(error).__name__}: {error}"[:MOST_TEXT])


def on_hosts_seen(callback: Callable[[int, int], None]) -> None:
    """Have ``callback(counter, kind)`` called, on another thread, when hosts have changed.

    One callback at a time: the last one counts. Without effect without a driver.
    """
    if this_process.worker is not None:
        this_process.worker.link.on_seen = callback


def world_is_broken() -> bool:
    """Return whether no collective can work any more: a rank is lost, or the world is over."""
    runtime, worker = find(), this_process.worker
    if runtime is not None and runtime.engine.failed:
        return True
    return worker is not None and worker.world is not None and worker.is_over()
