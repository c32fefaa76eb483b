"""Where the state of a sync comes from, and which ranks receive it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from hvdlite.common.api.objects import allgather_object
from hvdlite.common.driver_link.frames import World
from hvdlite.common.runtime.current import current, for_collective
from hvdlite.common.runtime.lifecycle import add_process_set, remove_process_set
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set


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


# The check that all ranks have the same tensors before their values are sent in flat buffers.


Kinds = Mapping[str, str]  # by the name of a tensor: its dtype and shape


def check_same_tensors(kinds: Kinds, label: str, source: Source) -> None:
    """Raise `ValueError` on all ranks of a sync if a tensor differs between the root and another.

    `label` names the owner of the tensors, such as a model. Only a digest is sent while all agree.
    """
    process_set = source.process_set
    digest = hashlib.blake2b(repr(list(kinds.items())).encode(), digest_size=16).digest()
    digests = allgather_object(digest, f"elastic.{label}.digest", process_set)
    if len(set(digests)) == 1:
        return
    of_ranks = allgather_object(dict(kinds), f"elastic.{label}.tensors", process_set)
    ranks = process_set.ranks or list(range(for_collective().topology.size))
    root = ranks.index(source.root_rank)
    raise ValueError(_difference(label, ranks, of_ranks, root))


def _difference(label: str, ranks: Sequence[int], of_ranks: Sequence[Kinds], root: int) -> str:
    expected = of_ranks[root]
    for rank, kinds in zip(ranks, of_ranks, strict=True):
        for name in [*expected, *(name for name in kinds if name not in expected)]:
            here, there = kinds.get(name, "no such tensor"), expected.get(name, "no such tensor")
            if here != there:
                return (
                    f"not the same on all ranks in the state's {label}: tensor '{name}' is {there} "
                    f"on rank {ranks[root]} and {here} on rank {rank}: build it alike everywhere"
                )
    return f"the state's {label} has its tensors in another order on another rank"
