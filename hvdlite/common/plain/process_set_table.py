"""The process sets of a job: which ranks belong to which number."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

GLOBAL_ID = 0


def flatten(sets: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Sets of ranks in one row of numbers: each with its length before it."""
    numbers: list[int] = []
    for ranks in sets:
        members = list(ranks)
        numbers += [len(members), *members]
    return tuple(numbers)


def unflatten(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """The sets of `flatten`."""
    sets, start = [], 0
    while start < len(numbers):
        end = start + 1 + numbers[start]
        sets.append(tuple(numbers[start + 1 : end]))
        start = end
    return sets


class ProcessSetTable:
    """number -> ranks. Every rank changes its table at the same point of the total order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._members: dict[int, tuple[int, ...]] = {GLOBAL_ID: tuple(range(size))}
        self._next = GLOBAL_ID + 1
        self._freed: deque[int] = deque()

    def check(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """`ranks` in ascending order. Raises `ValueError` where they cannot be a new set."""
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
        for number, known in self._members.items():
            if known == members:
                raise ValueError(
                    f"duplicate process set: {list(members)} is process set {number} already"
                )
        return members

    def add(self, ranks: Iterable[int]) -> int:
        """Register a set; its number. Raises `ValueError` as `check` does."""
        members = self.check(ranks)
        if self._freed:
            number = self._freed.popleft()
        else:
            number = self._next
            self._next += 1
        self._members[number] = members
        return number

    def remove(self, number: int) -> None:
        """Forget a set; its number is used again, the longest free first."""
        del self._members[number]
        self._freed.append(number)

    def members(self, number: int) -> tuple[int, ...]:
        """The global ranks of a set, ascending. Raises `KeyError`."""
        return self._members[number]

    def find(self, number: int) -> tuple[int, ...] | None:
        """The global ranks of a set, or None where it does not exist."""
        return self._members.get(number)

    def all(self) -> dict[int, list[int]]:
        """All sets, by number."""
        return {number: list(ranks) for number, ranks in sorted(self._members.items())}
