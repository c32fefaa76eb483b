"""What tools written for Horovod find beside the driver of an elastic job: places and settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdlite.launcher.decisions.driver import RESET_LIMIT_EXCEEDED

RESET_LIMIT_EXCEEDED_MESSAGE = RESET_LIMIT_EXCEEDED  # format(limit) gives the text.


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


class ElasticSettings:
    """Keeps what it is given, and any further settings, as attributes. Times are in seconds."""

    def __init__(
        self,
        discovery: Any,
        min_num_proc: int,
        max_num_proc: int | None,
        elastic_timeout: int | None,
        reset_limit: int | None,
        cooldown_range: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> None:
        self.discovery, self.min_num_proc = discovery, min_num_proc
        self.max_num_proc, self.elastic_timeout = max_num_proc, elastic_timeout
        self.reset_limit, self.cooldown_range = reset_limit, cooldown_range
        vars(self).update(kwargs)
