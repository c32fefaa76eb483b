"""The process sets that a worker of an elastic job keeps from world to world.

A set is made of workers, not of ranks: in the next world it has the ranks of those members that
live on, and a set without any is gone. Ranks number the sets anew, in their old order and the same
way on all of them, also on newcomers. A set that only some survivors know is dropped: the world
broke while it was added or removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgpack

from hvdlite.common.membership.frames import World
from hvdlite.common.plain.process_set_table import GLOBAL_ID
from hvdlite.common.runtime.process_sets import ProcessSet

# What stands for a set on all ranks: INIT and its position in the argument of `init`; or the epoch
# and the id with which it was added, and its workers.
Key = tuple[int, ...]
INIT = 0  # No world has this epoch.


class KeptSet(NamedTuple):
    """One set, by the numbers of its workers."""

    key: Key
    numbers: tuple[int, ...]


class KeptSets:
    """The sets of one worker."""

    def __init__(self) -> None:
        # Whether this worker has been in a world, so that it knows all sets.
        self._knows = False
        self._sets: list[KeptSet] = []
        self._objects: dict[Key, ProcessSet] = {}
        # The sets of the world that begins, in the order of their ids.
        self._agreed: list[KeptSet] = []
        # Whether that world follows another one, from which all sets are; `init` makes none then.
        self.follows = False

    def note_init(self, sets: Iterable[ProcessSet]) -> None:
        """Note the argument of the first `init`: newcomers know these sets by their positions."""
        self._objects = {(INIT, position): each for position, each in enumerate(sets)}

    def note_world(
        self, world: World, ranks: Mapping[int, Sequence[int]], objects: Mapping[int, ProcessSet]
    ) -> None:
        """Note the sets of a world before it ends: ranks and objects by process set id."""
        by_position = {id(each): key for key, each in self._objects.items()}
        agreed = dict(enumerate(self._agreed, GLOBAL_ID + 1))
        first = not self._knows
        self._sets, self._objects, self._knows = [], {}, True
        for process_set_id, members in ranks.items():
            if process_set_id == GLOBAL_ID:
                continue
            numbers = tuple(world.numbers[rank] for rank in members)
            process_set, same = objects.get(process_set_id), agreed.get(process_set_id)
            key: Key = (world.epoch, process_set_id, *numbers)
            if same is not None and same.numbers == numbers:
                key = same.key
            elif first:
                key = by_position.get(id(process_set), key)
            self._sets.append(KeptSet(key, numbers))
            if process_set is not None:
                self._objects[key] = process_set

    def pack(self) -> bytes:
        """Return what this worker tells the others when they meet."""
        body: bytes = msgpack.packb([self._knows, self._sets])
        return body

    def agree(self, bodies: Sequence[bytes], world: World) -> list[tuple[int, ...]]:
        """Return the ranks of all sets in the order of their ids, from what all workers tell."""
        told = [msgpack.unpackb(body) for body in bodies]
        known = [[KeptSet(*map(tuple, each)) for each in sets] for knows, sets in told if knows]
        common = set.intersection(*({each.key for each in sets} for sets in known)) if known else ()
        self._agreed, self.follows = [], bool(known)
        for key, numbers in known[0] if known else ():
            left = tuple(each for each in world.numbers if each in numbers)
            if key in common and left:
                self._agreed.append(KeptSet(key, left))
        rank_of = {number: rank for rank, number in enumerate(world.numbers)}
        return [tuple(rank_of[each] for each in numbers) for _, numbers in self._agreed]

    def bind(self, ranks: Mapping[int, Sequence[int]]) -> dict[int, ProcessSet]:
        """Give the objects of this worker their new ids and ranks; return the objects by id.

        Objects of sets that are gone have no members, and cannot be used.
        """
        bound: dict[int, ProcessSet] = {}
        for process_set_id, (key, _) in enumerate(self._agreed, GLOBAL_ID + 1):
            process_set = self._objects.get(key)
            if process_set is not None:
                process_set._bind(process_set_id, ranks[process_set_id])
                bound[process_set_id] = process_set
        kept = {id(each) for each in bound.values()}
        for process_set in self._objects.values():
            if self.follows and id(process_set) not in kept:
                process_set._vanish()
        return bound
