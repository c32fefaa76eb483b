"""The process sets that only their members make: formed and released without the other ranks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.requests.entries import Entry
from hvdlite.common.requests.messages import Request
from hvdlite.common.requests.process_set_table import GLOBAL_ID, FormedSet
from hvdlite.common.runtime.current import current
from hvdlite.common.runtime.process_sets import ProcessSet

if TYPE_CHECKING:
    from hvdlite.common.engine.engine import Engine


def form_process_set(ranks: Iterable[int], timeout_seconds: float | None = None) -> ProcessSet:
    """Make a process set by a call of its members alone; blocks until all of them have called.

    `ranks` are its global ranks in any order, and this rank is one of them. No other rank takes
    part: it may wait in a collective, or have joined. Each call gives another object, to be given
    to `release_process_set` once; calls for the same ranks share one set and its id, also with
    `add_process_set`. The set ends with the last release, and with this world: a reset of an
    elastic job and a shutdown leave none.

    Raises `ValueError` for what cannot be a set, or one without this rank; `HorovodInternalError`
    when a member has shut down or joined, or is lost, and after `timeout_seconds`. A member that
    gives other ranks, or none, does not come: the stall report names it.
    """
    runtime, process_set = current(), ProcessSet(ranks)
    members = runtime.engine.process_sets.checked(runtime.ranks_of(process_set))
    if runtime.rank not in members:
        raise ValueError(
            f"process set {list(members)} is formed by its members alone, and rank "
            f"{runtime.rank} is none of them"
        )
    with runtime.formed_sets.alone(members):
        abandoned = runtime.formed_sets.abandoned
        entry = abandoned.pop(members, None)
        if entry is None:
            name = f"form_process_set.{list(members)}"
            entry = Entry(Request(GLOBAL_ID, name, "form_process_set", parties=members))
            runtime.engine.enqueue([entry])
        try:
            if timeout_seconds is not None and not entry.handle.ended_within(
                min(timeout_seconds, threading.TIMEOUT_MAX)
            ):
                raise HorovodInternalError(
                    f"the group of the ranks {list(members)} was not formed after "
                    f"{timeout_seconds:g} s: one of them has not made this call. Rank 0 logs which "
                    "ones after HVDLITE_STALL_CHECK_TIME_SECONDS; a longer timeout can be given to "
                    "new_group()",
                    job_goes_on=True,
                )
            formed: FormedSet = entry.handle.wait()
        except BaseException:
            engine = weakref.proxy(runtime.engine)  # Else its queue would hold it by the callback.
            abandoned[members] = entry
            entry.handle.on_end(lambda: _release_unwanted(engine, abandoned, members))
            raise
        process_set._bind(formed.process_set_id, members)
        if formed.is_new:  # No other thread has the set yet.
            runtime.begin_set(process_set)
    runtime.formed_sets.uses[id(process_set)] = formed, process_set
    return process_set


def release_process_set(process_set: ProcessSet) -> None:
    """Give back a set of `form_process_set`; never waits.

    Every member calls it, at any time: the set goes when the last one has. `process_set` cannot be
    used any more. Raises `ValueError` for a set that was not formed, or is released already.
    """
    runtime = current()
    formed, _ = runtime.formed_sets.uses.pop(id(process_set), (None, None))
    if formed is None:
        raise ValueError(f"{process_set} was not formed by its members, or is released already")
    members = tuple(process_set.ranks or ())
    process_set._invalidate()
    runtime.forget_calls()
    _tell(runtime.engine, formed, members)


def _release_unwanted(
    engine: Engine, abandoned: dict[tuple[int, ...], Entry], members: tuple[int, ...]
) -> None:
    """Release a use that nobody has waited for, unless a later call has taken it over."""
    entry = abandoned.pop(members, None)
    if entry is not None and entry.handle.error is None:
        _tell(engine, entry.handle.wait(), members)


def _tell(engine: Engine, formed: FormedSet, members: tuple[int, ...]) -> None:
    """Report a release; one that nobody hears any more is none the worse for it."""
    process_set_id, use, _ = formed
    name = f"release_process_set.{process_set_id}.{use}"
    request = Request(
        GLOBAL_ID, name, "release_process_set", root_rank=process_set_id, parties=members
    )
    with suppress(HorovodInternalError):
        engine.enqueue([Entry(request)])
