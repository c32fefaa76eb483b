"""The process sets of groups: formed by the members alone, as torch makes groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from hvdlite.common.runtime.process_sets import (
    ProcessSet,
    form_process_set,
    global_process_set,
    release_process_set,
)
from hvdlite.common.runtime.runtime import Runtime


def form(runtime: Runtime, members: Sequence[int], timeout: timedelta) -> ProcessSet:
    """Return the process set of `members`, all of which call this; blocks until they have.

    Raises `HorovodInternalError` after `timeout`.
    """
    if len(members) == runtime.topology.size:
        return global_process_set
    return form_process_set(members, timeout.total_seconds())


def release(process_set: ProcessSet) -> None:
    """Let go of the set of a group; it goes with the last group that has it."""
    if process_set is not global_process_set:
        release_process_set(process_set)
