"""The workers of a job, and the worlds that they form."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from signal import SIGKILL, SIGTERM

# Codes of workers that somebody else has ended; 0: it is not known, as the host was lost.
ENDED_FROM_OUTSIDE = (0, 128 + SIGKILL, 128 + SIGTERM)


class Stage(Enum):
    """What has become of a worker."""

    LIVING = "living"  # It is a rank, or may become one.
    LEAVING = "leaving"  # It was told to end; how it ends does not matter.
    RETURNED = "returned"  # It has ended with code 0, which counts.
    LOST = "lost"  # It has failed, or was given up.
    DISMISSED = "dismissed"  # It has ended as it was told.


@dataclass
class Worker:
    """A process; `number` is never used twice. `epoch` is the last world that it was told of."""

    number: int
    host: str
    slot: int
    start_rank: int
    replaces: bool = False  # It took the slot of a worker that had failed.
    stage: Stage = Stage.LIVING
    running: bool = True
    closed_at: float | None = None  # When its connection ended; it is about to end, too.
    said_bye: bool = False  # It ended its connection itself, as the script was done with the job.
    greeted: bool = False
    ready: bool = False
    commit: int = 0
    epoch: int = 0
    counts: bool = False  # It returned as a rank, or before there was a world.
    terminate_at: float | None = None
    kill_at: float | None = None
    by_script: bool = False  # It was lost by an exit code or exception of its own.
    raised: bool = False  # It was lost by an exception before its process had ended.
    why: str = ""
    code: int = 0

    @property
    def living(self) -> bool:
        """It is a rank, or may become one."""
        return self.stage is Stage.LIVING

    @property
    def done(self) -> bool:
        """It has returned, or something else has ended it after the script was done with the job.

        What ends by a signal of its own, such as SIGSEGV, is not done.
        """
        if self.stage is not Stage.LOST:
            return self.stage is Stage.RETURNED
        return self.said_bye and not self.by_script and self.code in ENDED_FROM_OUTSIDE

    @property
    def past(self) -> bool:
        """It has ended, and nothing depends on it any more."""
        return not self.running and self.stage not in (Stage.LIVING, Stage.RETURNED)

    @property
    def ending(self) -> bool:
        """It is lost, and its process has not ended yet."""
        return self.stage is Stage.LOST and self.running

    @property
    def unwinding(self) -> bool:
        """It is lost by an exception, and its process prints the traceback or ends."""
        return self.ending and self.raised

    @property
    def holds_slot(self) -> bool:
        """No other worker may start in its slot."""
        if self.stage is Stage.LEAVING:
            return self.running
        return self.stage in (Stage.LIVING, Stage.RETURNED)


class Workers:
    """The workers, by number. Iteration leaves out those that are no concern any more."""

    def __init__(self) -> None:
        self._workers: dict[int, Worker] = {}
        self._current: dict[str, list[Worker]] = {}  # By host, without those that are past.

    def __getitem__(self, number: int) -> Worker:
        return self._workers[number]

    def __iter__(self) -> Iterator[Worker]:
        return (worker for workers in self._current.values() for worker in workers)

    def get(self, number: int) -> Worker | None:
        """Return a worker, or None if there never was one of this number."""
        return self._workers.get(number)

    def ever(self) -> Collection[Worker]:
        return self._workers.values()

    def start(self, host: str, slot: int, start_rank: int, replaces: bool) -> Worker:
        """Return a new worker with the next number."""
        worker = Worker(len(self._workers), host, slot, start_rank, replaces)
        self._workers[worker.number] = worker
        self._current.setdefault(host, []).append(worker)
        return worker

    def living(self, numbers: Iterable[int] | None = None) -> list[Worker]:
        """Return the living workers, all or those of `numbers`, in this order."""
        workers = self if numbers is None else (self[number] for number in numbers)
        return [worker for worker in workers if worker.stage is Stage.LIVING]

    def by_host(self) -> Iterator[tuple[str, list[Worker]]]:
        """Yield each host and its living workers, in the order of their start."""
        for host, workers in self._current.items():
            if living := [worker for worker in workers if worker.stage is Stage.LIVING]:
                yield host, living

    def on(self, host: str) -> list[Worker]:
        """Return the workers of a host, in the order of their start."""
        return [*self._current.get(host, ())]

    def forget_past(self) -> None:
        """Leave out the workers whose processes have ended, and which did not return."""
        for host, workers in self._current.items():
            if any(worker.past for worker in workers):
                self._current[host] = [worker for worker in workers if not worker.past]


# A world: who its ranks are, who gives the state to whom, and the way to the next world.


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
