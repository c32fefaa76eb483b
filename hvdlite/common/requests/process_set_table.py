"""The process sets of a job: which ranks belong to which process set id."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

GLOBAL_ID = 0


def flatten(sets: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Write sets of ranks as one tuple, each set with its length before it."""
    numbers: list[int] = []
    for ranks in sets:
        members = list(ranks)
        numbers += [len(members), *members]
    return tuple(numbers)


def unflatten(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the sets that `flatten` has written."""
    sets, start = [], 0
    while start < len(numbers):
        end = start + 1 + numbers[start]
        sets.append(tuple(numbers[start + 1 : end]))
        start = end
    return sets


class FormedSet(NamedTuple):
    """What the members of a new set learn: its id, and which use of it they have begun."""

    process_set_id: int
    use: int  # The number of the use, from 1 on; 0 where all ranks have added the set.
    is_new: bool  # Whether no set had these ranks before.


class ProcessSetTable:
    """The ranks of each process set; all ranks change it at the same point of the order.

    A set is there because all ranks have added it, because its members have formed it, or both.
    Each forming is a use of the set, which its members release; the last one to go takes it away.
    """

    def __init__(self, size: int, sets: Iterable[tuple[int, ...]] = ()) -> None:
        """Begin with the `sets` that an earlier world has left; losses may have made them equal."""
        self.size = size
        self._members = dict(enumerate((tuple(range(size)), *sets), GLOBAL_ID))
        self._next = GLOBAL_ID + len(self._members)
        self._freed: deque[int] = deque()
        # The sets that all ranks have added; and the uses of formed ones: how many have begun, and
        # how many of these are not released.
        self._added = set(self._members)
        self._uses: dict[int, tuple[int, int]] = {}

    def check(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return `ranks` in ascending order. Raises `ValueError` if they cannot be added."""
        members = self.checked(ranks)
        process_set_id = self.id_of(members)
        if process_set_id in self._added:
            raise ValueError(
                f"duplicate process set: {list(members)} is process set {process_set_id} already"
            )
        return members

    def checked(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return `ranks` in ascending order. Raises `ValueError` if they cannot be a set."""
        members = tuple(sorted(ranks))
        if len(set(members)) != len(members):
            raise ValueError(f"process set {list(members)} names a rank twice")
        if not members:
            raise ValueError("a process set needs at least one rank")
        foreign = [rank for rank in members if not 0 <= rank < self.size]
        if foreign:
            raise ValueError(
                f"process set {list(members)}: rank {foreign[0]} does not exist; "
                f"the job has ranks 0 to {self.size - 1}"
            )
        return members

    def id_of(self, members: tuple[int, ...]) -> int | None:
        """Return the id of the set of these ranks, ascending, or None if there is no such set."""
        return next((key for key, ranks in self._members.items() if ranks == members), None)

    def add(self, ranks: Iterable[int]) -> int:
        """Register a set for all ranks and return its id. Raises `ValueError` as `check` does."""
        process_set_id = self._find_or_make(self.check(ranks))
        self._added.add(process_set_id)
        return process_set_id

    def form(self, ranks: tuple[int, ...]) -> FormedSet:
        """Begin a use of the set of these ranks, ascending; make the set if there is none."""
        is_new = self.id_of(ranks) is None
        process_set_id = self._find_or_make(ranks)
        begun, left = self._uses.get(process_set_id, (0, 0))
        self._uses[process_set_id] = begun + 1, left + 1
        return FormedSet(process_set_id, begun + 1, is_new)

    def _find_or_make(self, members: tuple[int, ...]) -> int:
        known = self.id_of(members)
        if known is not None:
            return known
        if self._freed:
            process_set_id = self._freed.popleft()
        else:
            process_set_id = self._next
            self._next += 1
        self._members[process_set_id] = members
        return process_set_id

    def remove(self, process_set_id: int) -> bool:
        """Undo `add`; return whether the set is gone: not if it is in use by those who formed it.

        Its id is used again then, the longest free one first, as in Horovod.
        """
        self._added.discard(process_set_id)
        return self._drop_unused(process_set_id)

    def release(self, process_set_id: int) -> bool:
        """End a use of a formed set; return whether the set is gone, as by `remove`."""
        begun, left = self._uses[process_set_id]
        self._uses[process_set_id] = begun, left - 1
        return self._drop_unused(process_set_id)

    def _drop_unused(self, process_set_id: int) -> bool:
        if process_set_id in self._added or self._uses.get(process_set_id, (0, 0))[1]:
            return False
        del self._members[process_set_id]
        self._uses.pop(process_set_id, None)
        self._freed.append(process_set_id)
        return True

    def added(self) -> list[tuple[int, ...]]:
        """Return the ranks of all sets but the global one, in the order of their ids.

        Sets that only their members have formed are not among them.
        """
        keys = sorted(self._added - {GLOBAL_ID})
        return [self._members[key] for key in keys]

    def is_added(self, process_set_id: int) -> bool:
        """Return whether all ranks have added a set, also where its members have formed it, too."""
        return process_set_id in self._added

    def members(self, process_set_id: int) -> tuple[int, ...]:
        """Return the global ranks of a set, ascending. Raises `KeyError`."""
        return self._members[process_set_id]

    def find(self, process_set_id: int) -> tuple[int, ...] | None:
        """Return the global ranks of a set, ascending, or None if there is no such set."""
        return self._members.get(process_set_id)

    def all(self) -> dict[int, list[int]]:
        """Return the ranks of all sets by process set id, also of those that are formed."""
        return {key: list(ranks) for key, ranks in sorted(self._members.items())}
