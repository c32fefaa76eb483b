"""A world: who its ranks are, who gives the state to whom, and the way to the next world."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdlite.launcher.decisions.workers import Worker


class NoStateError(Exception):
    """Nobody holds what has been committed."""


@dataclass(frozen=True)
class World:
    """The workers of an epoch in rank order; `members` has their numbers.

    The state of rank `root`, of number `commit`, goes to the ranks `behind`.
    """

    epoch: int
    members: tuple[int, ...]
    hosts: tuple[str, ...]
    root: int
    behind: tuple[int, ...]
    commit: int

    def rank(self, number: int) -> int:
        return self.members.index(number)

    def frame(self) -> list[Any]:
        """Return the frame that tells the members of this world."""
        members = [list(pair) for pair in zip(self.members, self.hosts, strict=True)]
        return ["world", self.epoch, members, self.root, list(self.behind), self.commit]


def make_world(epoch: int, workers: Sequence[Worker], committed: int) -> World:
    """Return the world of the workers, which are in rank order.

    The root is the first with the highest commit; whoever holds less is behind. Before the first
    commit, it is the first that was in a world, and all others are behind. `committed` is the
    highest number of a commit so far. Raises `NoStateError` when nobody holds a commit any more.
    """
    commits = [worker.commit for worker in workers]
    commit = max(commits)
    if committed and not commit:
        raise NoStateError
    if commit:
        root = commits.index(commit)
        behind = [rank for rank, each in enumerate(commits) if each < commit]
    else:
        was_there = [worker.epoch > 0 for worker in workers]
        root = was_there.index(True) if True in was_there else 0
        behind = [rank for rank in range(len(workers)) if rank != root]
    numbers = tuple(worker.number for worker in workers)
    hosts = tuple(worker.host for worker in workers)
    return World(epoch, numbers, hosts, root, tuple(behind), commit)


def keep_order(line: Sequence[int], kept: Sequence[int], members: Sequence[int]) -> list[int]:
    """Return the members in their order, with the kept ones of the old `line` at their places."""
    result = list(members)
    for index, number in enumerate(line):
        if number in kept:
            before = [each for each in line[:index] if each in result]
            result.insert(result.index(before[-1]) + 1 if before else 0, number)
    return result


class CheckAgreement:
    """Finds the first check that no rank has passed yet.

    All ranks were told to hold in their next check and to say how many they have passed.
    """

    def __init__(self, counter: int, numbers: Iterable[int]) -> None:
        self.counter = counter
        self._missing = set(numbers)
        self._most_passed = 0

    def answer(self, number: int, counter: int, count: int) -> None:
        """Take the number of checks that a worker has passed; an answer of old is ignored."""
        if counter == self.counter and number in self._missing:
            self._missing.remove(number)
            self._most_passed = max(self._most_passed, count)

    def leave_out(self, number: int) -> None:
        """Do not wait for a worker that has returned."""
        self._missing.discard(number)

    @property
    def check(self) -> int | None:
        """The number of the check; None: not all have answered."""
        return None if self._missing else self._most_passed + 1


@dataclass
class Reset:
    """A world is to be replaced, since the time `since`.

    It begins in one of two ways. Either hosts have changed, then all ranks agree on the check that
    raises in them; or a rank was lost, or has left the world, then the others are told to regroup.
    """

    since: float
    agreement: CheckAgreement | None = None
    kind: int = 0
    raised: bool = False  # All ranks know the check.
    interrupted: bool = False  # The first rank is there.
    regroup_at: float | None = None  # A rank has left the world; who was lost is not known yet.
    regrouped: bool = False
    left: set[int] = field(default_factory=set)  # The ranks that have left this very world.
    losses: list[Worker] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """All ranks know that their world is over."""
        return self.regrouped or self.raised
