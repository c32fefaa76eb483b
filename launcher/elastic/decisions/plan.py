"""What the user of an elastic job asked for."""

from __future__ import annotations

from dataclasses import dataclass

READY, WAIT = "ready", "wait"


@dataclass(frozen=True)
class ElasticPlan:
    """The limits and policies of an elastic job; times are in seconds.

    `num_proc` slots are needed for the first start, `min_np` later. `cooldown` is the range
    (low, high) of a failed host's absence; None: it never comes back. `elastic_timeout` limits
    every wait for slots, `start_timeout` that for an agent. `admit` says whether a change of hosts
    interrupts the workers when the newcomers are "ready", or at once, so that all "wait" for them.
    `failures_by_host`: a failed worker excludes its whole host, and not only its slot.
    """

    num_proc: int
    min_np: int
    max_np: int | None = None
    reset_limit: int | None = None
    cooldown: tuple[int, int] | None = None
    elastic_timeout: float = 600.0
    start_timeout: float = 30.0
    admit: str = READY
    failures_by_host: bool = False
