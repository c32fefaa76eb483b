"""Where the state of a sync comes from, and which ranks receive it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from hvdlite.common.membership.frames import World
from hvdlite.common.runtime.lifecycle import add_process_set, remove_process_set
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.runtime.state import current


@dataclass(frozen=True)
class Source:
    """The root of a sync, and the ranks that take part in it: the root and its receivers."""

    root_rank: int = 0
    process_set: ProcessSet = global_process_set

    @property
    def takes_part(self) -> bool:
        """Whether this rank sends or receives; otherwise it holds the root's state already."""
        return self.process_set is global_process_set or bool(self.process_set.included())


RANK_0 = Source()
_source: ContextVar[Source] = ContextVar("source", default=RANK_0)


def sync_source() -> Source:
    """Return the source of the sync that is running: rank 0 for all, unless the world has one."""
    return _source.get()


@contextmanager
def source_of(world: World) -> Iterator[None]:
    """Let the ranks that are behind, and only these, receive the state of the world's root."""
    process_set, added = _set_of(sorted({world.root, *world.behind}), world.size)
    token = _source.set(Source(world.root, process_set))
    try:
        yield
    finally:
        _source.reset(token)
    # Not after an error: the world is over then, and its sets with it.
    if added:
        remove_process_set(process_set)


def _set_of(ranks: list[int], size: int) -> tuple[ProcessSet, bool]:
    """Return the process set of these ranks, and whether it was added for this."""
    if len(ranks) == size:
        return global_process_set, False
    for known in current().known_sets.values():
        if known.ranks == ranks:
            return known, False
    return add_process_set(ProcessSet(ranks)), True
