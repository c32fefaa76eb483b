"""The process sets of a job: which ranks belong to which process set id."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

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


class ProcessSetTable:
    """The ranks of each process set; all ranks change it at the same point of the order."""

    def __init__(self, size: int, sets: Iterable[tuple[int, ...]] = ()) -> None:
        """Begin with the `sets` that an earlier world has left; losses may have made them equal."""
        self.size = size
        self._members = dict(enumerate((tuple(range(size)), *sets), GLOBAL_ID))
        self._next = GLOBAL_ID + len(self._members)
        self._freed: deque[int] = deque()

    def check(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return `ranks` in ascending order. Raises `ValueError` if they cannot be a new set."""
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
        for process_set_id, ranks_of_set in self._members.items():
            if ranks_of_set == members:
                raise ValueError(
                    f"duplicate process set: {list(members)} is process set {process_set_id}"
                    " already"
                )
        return members

    def add(self, ranks: Iterable[int]) -> int:
        """Register a set and return its id. Raises `ValueError` as `check` does."""
        members = self.check(ranks)
        if self._freed:
            process_set_id = self._freed.popleft()
        else:
            process_set_id = self._next
            self._next += 1
        self._members[process_set_id] = members
        return process_set_id

    def remove(self, process_set_id: int) -> None:
        """Forget a set. Its id is used again, the longest free one first, as in Horovod."""
        del self._members[process_set_id]
        self._freed.append(process_set_id)

    def added(self) -> list[tuple[int, ...]]:
        """Return the ranks of all sets but the global one, in the order of their ids."""
        return [ranks for key, ranks in sorted(self._members.items()) if key != GLOBAL_ID]

    def members(self, process_set_id: int) -> tuple[int, ...]:
        """Return the global ranks of a set, ascending. Raises `KeyError`."""
        return self._members[process_set_id]

    def find(self, process_set_id: int) -> tuple[int, ...] | None:
        """Return the global ranks of a set, ascending, or None if there is no such set."""
        return self._members.get(process_set_id)

    def all(self) -> dict[int, list[int]]:
        """Return the ranks of all sets by process set id."""
        return {key: list(ranks) for key, ranks in sorted(self._members.items())}
