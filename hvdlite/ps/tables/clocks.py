"""When a push counts, when a version is complete, and when a pull may be answered.

The clock of a worker is the number of its finished steps; the version of a server is the number of
updates that it has made. `Clocks` are those of one server. Three modes:

| mode | an update is made of | a pull with the clock c waits until |
|---|---|---|
| sync | the pushes of a step of all workers | the server has the version c |
| async | one push | nothing |
| ssp | one push | every worker has finished c - staleness steps |

ssp is the stale synchronous parallel model (Ho et al., NIPS 2013): the fastest worker is never more
than `staleness` + 1 finished steps ahead of the slowest one.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

SYNC, ASYNC, SSP = "sync", "async", "ssp"
MODES = (SYNC, ASYNC, SSP)
SCALE = "1/W"


@dataclass(frozen=True)
class Mode:
    """How pushes become updates, and how far workers may be apart."""

    name: str
    staleness: int | None = None
    scale: str | None = None  # "1/W": a push is divided by the number of workers that take part.

    def __post_init__(self) -> None:
        """Raise ValueError where the two do not fit."""
        if self.name not in MODES:
            raise ValueError(f"mode is {self.name!r}, which is none of {', '.join(MODES)}")
        if self.name != SSP and self.staleness is not None:
            raise ValueError(
                f"staleness={self.staleness!r} bounds how far workers are apart in mode ssp, and "
                f"the mode is {self.name}: leave it out, or give mode='ssp'"
            )
        if self.name == SSP and (type(self.staleness) is not int or self.staleness < 0):
            raise ValueError(
                f"staleness is {self.staleness!r}; mode ssp needs a number of steps, 0 or more"
            )
        if self.scale not in (None, SCALE):
            raise ValueError(f"scale is {self.scale!r}, which is neither None nor {SCALE!r}")
        if self.name == SYNC and self.scale is not None:
            raise ValueError(
                f"scale={self.scale!r} divides each push of modes async and ssp, and the mode is "
                "sync: leave it out, and give op=Average"
            )


@dataclass
class Clocks:
    """The clocks of the workers that take part, and the version of one server."""

    mode: Mode
    version: int = 0
    finished: dict[int, int] = field(default_factory=dict)  # Steps of each worker that takes part.
    # Of sync: step -> the workers whose push of it is here. Some may be a step ahead.
    present: dict[int, set[int]] = field(default_factory=dict)

    def enter(self, worker: int) -> int:
        """Let a worker take part, again after a pause where it did before; return its clock.

        A worker that is new begins where the others are: in sync with the first step of which no
        push is here, else at the lowest clock of the others.
        """
        if worker not in self.finished:
            if self.mode.name == SYNC:
                self.finished[worker] = max(self.present, default=self.version - 1) + 1
            else:
                self.finished[worker] = min(self.finished.values(), default=0)
        return self.finished[worker]

    def leave(self, worker: int) -> None:
        """Let the others go on without a worker. What it has pushed counts."""
        self.finished.pop(worker, None)

    def stand(
        self, version: int, clocks: Mapping[int, int], newcomers: Collection[int] = ()
    ) -> None:
        """Have workers at these steps: the values that were loaded have no push of them.

        In sync, all of them make the update after `version`; no push of it is here any more. Of
        `newcomers` this server knows nothing yet.
        """
        if self.mode.name == SYNC:
            self.version = max(self.version, version)
            clocks = dict.fromkeys([*self.finished, *newcomers], self.version)
        known = self.finished.keys() | set(newcomers)
        self.finished.update({each: clocks[each] for each in known & clocks.keys()})
        self.present.clear()

    def push(self, worker: int, clock: int) -> bool:
        """Take note of the push of step `clock`; return False for one that was here before.

        Raises ValueError for a step that is not the worker's next one: a step is missing.
        """
        expected = self.finished[worker]
        if clock < expected:
            return False
        if clock > expected:
            raise ValueError(
                f"worker {worker} pushes step {clock}, and its next step is {expected}"
            )
        self.finished[worker] = clock + 1
        if self.mode.name == SYNC:
            self.present.setdefault(clock, set()).add(worker)
        return True

    def complete(self) -> list[int] | None:
        """Return the workers whose pushes make the next update of sync, in rank order.

        None: some worker that takes part has not pushed yet, or nobody has.
        """
        present = self.present.get(self.version, set())
        return None if self.late() or not present else sorted(present)

    def update(self) -> None:
        self.present.pop(self.version, None)
        self.version += 1

    def late(self) -> list[int]:
        """Return the workers whose push of the next update of sync is not here, sorted."""
        return sorted(worker for worker, clock in self.finished.items() if clock <= self.version)

    def may_pull(self, worker: int, clock: int) -> bool:
        """Return whether a pull that a worker makes with `clock` finished steps can be answered.

        Its own pushes are to be here, of which one may still be on its way, as it is sent again.
        """
        if self.mode.name == SYNC:
            return self.version >= clock
        if self.finished.get(worker, clock) < clock:
            return False
        if self.mode.staleness is None:
            return True
        return min(self.finished.values(), default=clock) >= clock - self.mode.staleness
