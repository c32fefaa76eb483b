"""The process sets of one rank that only their members have made."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.plain.entries import Entry
from hvdlite.common.plain.messages import Request
from hvdlite.common.plain.process_set_table import GLOBAL_ID, FormedSet
from hvdlite.common.runtime.process_sets import ProcessSet

if TYPE_CHECKING:
    from hvdlite.common.runtime.runtime import Runtime


class FormedSets:
    """The uses of formed sets that this rank has begun and not released."""

    def __init__(self, runtime: Runtime) -> None:
        # Weak: a runtime that is let go closes its files at once, not at some collection.
        self._runtime: Runtime = weakref.proxy(runtime)
        # By the id of its object, which is kept: the number of the use, and its set.
        self._uses: dict[int, tuple[FormedSet, ProcessSet]] = {}
        # The sets that threads of this rank are forming: one thread at a time for each.
        self._forming: set[tuple[int, ...]] = set()
        self._changed = threading.Condition()

    def form(self, process_set: ProcessSet, timeout_seconds: float | None = None) -> ProcessSet:
        """See `form_process_set`; `process_set` has its ranks, and gets its id."""
        runtime = self._runtime
        members = runtime.engine.process_sets.checked(runtime.ranks_of(process_set))
        if runtime.rank not in members:
            raise ValueError(
                f"process set {list(members)} is formed by its members alone, and rank "
                f"{runtime.rank} is none of them"
            )
        with self._alone(members):
            name = f"form_process_set.{list(members)}"
            entry = Entry(Request(GLOBAL_ID, name, "form_process_set", parties=members))
            runtime.engine.enqueue([entry])
            try:
                _wait(entry, members, timeout_seconds)
                formed: FormedSet = entry.handle.wait()
            except BaseException:
                entry.handle.on_end(lambda: self._release_unwanted(entry, members))
                raise
        process_set._bind(formed.process_set_id, members)
        if formed.is_new:  # The id may have been another set's.
            runtime.restart(process_set)
        self._uses[id(process_set)] = formed, process_set
        return process_set

    def release(self, process_set: ProcessSet) -> None:
        """See `release_process_set`."""
        formed, _ = self._uses.pop(id(process_set), (None, None))
        if formed is None:
            raise ValueError(f"{process_set} was not formed by its members, or is released already")
        members = tuple(process_set.ranks or ())
        process_set._invalidate()
        self._runtime.forget_calls()
        self._tell(formed, members)

    def close(self) -> None:
        """Let no set be used any more."""
        while self._uses:
            _, (_, process_set) = self._uses.popitem()
            process_set._invalidate()

    @contextmanager
    def _alone(self, members: tuple[int, ...]) -> Iterator[None]:
        """Let one thread of this rank at a time form the set of these ranks."""
        with self._changed:
            self._changed.wait_for(lambda: members not in self._forming)
            self._forming.add(members)
        try:
            yield
        finally:
            with self._changed:
                self._forming.discard(members)
                self._changed.notify_all()

    def _release_unwanted(self, entry: Entry, members: tuple[int, ...]) -> None:
        """Release a use that nobody has waited for, after an interrupt."""
        if entry.handle.error is None:
            self._tell(entry.handle.wait(), members)

    def _tell(self, formed: FormedSet, members: tuple[int, ...]) -> None:
        """Report a release; one that nobody hears any more is none the worse for it."""
        process_set_id, use, _ = formed
        name = f"release_process_set.{process_set_id}.{use}"
        request = Request(
            GLOBAL_ID, name, "release_process_set", root_rank=process_set_id, parties=members
        )
        with suppress(HorovodInternalError):
            self._runtime.engine.enqueue([Entry(request)])


def _wait(entry: Entry, members: tuple[int, ...], seconds: float | None) -> None:
    """Sleep until the members have called. Raises `HorovodInternalError` after `seconds`."""
    if seconds is None or entry.handle.ended_within(min(seconds, threading.TIMEOUT_MAX)):
        return
    raise HorovodInternalError(
        f"the group of the ranks {list(members)} was not formed after {seconds:g} s: one of them "
        "has not made this call. Rank 0 logs which ones after HVDLITE_STALL_CHECK_TIME_SECONDS; a "
        "longer timeout can be given to new_group()",
        job_goes_on=True,
    )
