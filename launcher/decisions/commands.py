"""What the user asked for, and what the driver wants done: `Driver.take` hands that out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

READY, WAIT = "ready", "wait"


@dataclass(frozen=True)
class ElasticPlan:
    """The limits and policies of an elastic job; times are in seconds.

    `num_proc` slots are needed for the first start, `min_np` later. `cooldown` is the range
    (low, high) of a failed host's absence; None: it never comes back. `elastic_timeout` limits
    every wait for slots. `admit` says whether a change of hosts
    interrupts the workers when the newcomers are "ready", or at once, so that all "wait" for them.
    `failures_by_host`: a failed worker excludes its whole host, and not only its slot. An agent
    that is silent for `host_timeout_seconds` is lost, and one that hears nothing ends its workers.
    """

    num_proc: int
    min_np: int
    max_np: int | None = None
    reset_limit: int | None = None
    cooldown: tuple[int, int] | None = None
    elastic_timeout: float = 600.0
    admit: str = READY
    failures_by_host: bool = False
    host_timeout_seconds: float = 1.0


@dataclass(frozen=True)
class StartAgent:
    """Start an agent on a host; answered by `agent_came` or `agent_lost`."""

    host: str


@dataclass(frozen=True)
class DropAgent:
    """End the agent of a host, and with it every worker there, without an event."""

    host: str


@dataclass(frozen=True)
class StartWorker:
    """Start a worker; answered by its hello, or by `worker_ended`.

    `number` is never used twice in a job. `slot` is the index of the slot on the host.
    `start_rank` is the rank that the worker is expected to have in its first world. `place` has
    the keys RANK, SIZE, LOCAL_RANK, LOCAL_SIZE, CROSS_RANK and CROSS_SIZE.
    """

    number: int
    host: str
    slot: int
    start_rank: int
    place: dict[str, int]


@dataclass(frozen=True)
class EndWorker:
    """Send a worker SIGTERM, or SIGKILL if `kill`; a worker that has ended already is no error."""

    number: int
    kill: bool


@dataclass(frozen=True)
class Tell:
    """Send a frame to workers; one whose connection has ended is no error."""

    numbers: tuple[int, ...]
    frame: list[Any]


@dataclass(frozen=True)
class Say:
    """Show a line on the terminal."""

    line: str


@dataclass(frozen=True)
class Finish:
    """End the job: whatever still runs is ended, then the launcher exits with `code`.

    `sentence` says why; it is empty on success. `results` has the workers whose results count, in
    rank order of the last world; it is empty unless `code` is 0.
    """

    code: int
    sentence: str
    results: tuple[int, ...]


Command = StartAgent | DropAgent | StartWorker | EndWorker | Tell | Say | Finish
