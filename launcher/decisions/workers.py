"""The workers of a job."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
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
