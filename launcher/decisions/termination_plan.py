"""How a job is ended: which step comes when. This module never signals, waits or reads a clock."""

from __future__ import annotations

import signal
from dataclasses import dataclass

Plan = tuple[tuple[float, str], ...]

INTERRUPT, TERMINATE, KILL, ABANDON = "interrupt", "terminate", "kill", "abandon"
REPEATED = -1  # stands for a signal after the first
# (seconds after the step before, step). KILL ends the ranks, ABANDON their mpirun: it cleans up
# behind its ranks where it is let live. From a user's signal to the end it takes under 5 s.
AFTER_FAILURE: Plan = ((3.0, TERMINATE), (1.5, KILL), (1.0, ABANDON))  # first the others may speak
AFTER_SIGINT: Plan = ((0.0, INTERRUPT), (1.5, TERMINATE), (1.5, KILL), (0.7, ABANDON))
AFTER_SIGTERM: Plan = ((0.0, TERMINATE), (2.5, KILL), (1.0, ABANDON))
AT_ONCE: Plan = ((0.0, KILL), (0.7, ABANDON))
AFTER_ALL_RANKS: Plan = ((5.0, ABANDON),)  # every rank has ended, mpirun has not
AFTER_SIGNAL: dict[int, Plan] = {signal.SIGINT: AFTER_SIGINT, REPEATED: AT_ONCE}
SIGNALS = {INTERRUPT: signal.SIGINT, TERMINATE: signal.SIGTERM, KILL: signal.SIGKILL}


@dataclass
class Ending:
    """The steps that are left, with the time of the next."""

    plan: Plan
    due: float

    @classmethod
    def begin(cls, plan: Plan, now: float) -> Ending:
        """Start with the first step of `plan`."""
        return cls(plan, now + plan[0][0])

    def next_step(self, now: float) -> str | None:
        """Return the step that is due at `now`; each is returned once."""
        if not self.plan or now < self.due:
            return None
        step = self.plan[0][1]
        self.plan = self.plan[1:]
        self.due = now + self.plan[0][0] if self.plan else float("inf")
        return step
