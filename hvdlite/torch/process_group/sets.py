"""The process sets of groups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hvdlite.common.runtime.lifecycle import add_process_set
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.runtime.runtime import Runtime

_SETS: dict[tuple[int, ...], ProcessSet] = {}


def form(runtime: Runtime, members: Sequence[int]) -> ProcessSet:
    """Return the process set of `members`, which are ascending; they alone call this."""
    size = runtime.topology.size
    if len(members) == size:
        if not _SETS:
            for k in range(1, size):
                for ranks in itertools.combinations(range(size), k):
                    _SETS[ranks] = add_process_set(list(ranks))
        return global_process_set
    return _SETS[tuple(members)]


def release(process_set: ProcessSet) -> None:
    """Let go of the set of a group; it goes with the last group that has it."""
