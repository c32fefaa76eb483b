"""The results of the workers of an elastic job, and the place of each worker."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from hvdlite.launcher.elastic.decisions.commands import StartWorker


@dataclass(frozen=True)
class SlotInfo:
    """The place of a worker; all numbers are -1 for a slot that has none."""

    hostname: str
    rank: int = -1
    local_rank: int = -1
    cross_rank: int = -1
    size: int = -1
    local_size: int = -1
    cross_size: int = -1

    @classmethod
    def of(cls, hostname: str, place: dict[str, int]) -> SlotInfo:
        """Return the slot of a place as the driver's decisions have it: RANK, SIZE and so on."""
        return cls(hostname, **{key.lower(): value for key, value in place.items()})


@dataclass(frozen=True)
class Results:
    """How a job has ended.

    `error_message` is None after a success. `worker_results` has an exit code and the time of the
    end for each worker of the last world, by "host[slot]".
    """

    error_message: str | None
    worker_results: dict[str, tuple[int, float]]


@dataclass
class ToolWorker:
    """A worker of the tool, which runs in a thread here."""

    start: StartWorker
    info: SlotInfo
    end: threading.Event = field(default_factory=threading.Event)
    epoch: int = 0  # Of the last world that it was told.
    greeted: bool = False
    dropped: bool = False
    result: tuple[int, float] | None = None

    @property
    def name(self) -> str:
        """The key of its result."""
        return f"{self.start.host}[{self.start.slot}]"
