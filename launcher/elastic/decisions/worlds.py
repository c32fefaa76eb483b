"""A world: who its ranks are, and who gives the state to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdlite.launcher.elastic.decisions.roster import Worker


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
        """Return the rank of a member."""
        return self.members.index(number)

    @property
    def listed(self) -> list[list[Any]]:
        """The members as frames have them: [[number, host], ...]."""
        return [list(pair) for pair in zip(self.members, self.hosts, strict=True)]

    def frame(self, rank: int) -> list[Any]:
        """Return the frame that tells a rank of this world."""
        return ["world", self.epoch, rank, self.listed, self.root, list(self.behind), self.commit]


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
