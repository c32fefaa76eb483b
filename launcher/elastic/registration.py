"""The results of the workers of an elastic job, and the place of each worker."""

from __future__ import annotations

from dataclasses import dataclass


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
