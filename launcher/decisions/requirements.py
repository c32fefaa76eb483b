"""What the next world waits for."""

from __future__ import annotations

from collections.abc import Callable

from hvdlite.launcher.decisions import lines
from hvdlite.launcher.decisions.commands import WAIT
from hvdlite.launcher.decisions.placement import Parts, Placement
from hvdlite.launcher.decisions.workers import Stage, Worker
from hvdlite.launcher.decisions.world_changes import WorldChanges

LINE_SECONDS = 10.0


class Requirements:
    """The workers and slots that a next world needs, and since when slots have been missing."""

    def __init__(self, parts: Parts, placement: Placement, worlds: WorldChanges) -> None:
        self._plan, self._hosts, self._workers = parts.plan, parts.hosts, parts.workers
        self._placement, self._worlds = placement, worlds
        self.first_hosts: set[str] = set()  # Those of the first start; empty before it.
        self._unwanted: set[int] = set()  # As of the last event of another kind.
        self._one_late: Worker | None = None  # See `others_are_late`.
        self._short_since: float | None = None
        self._line_at: float | None = None

    # -- workers

    def start_first(self, now: float) -> None:
        """Fix the hosts of the first start when there are enough slots."""
        usable = self._hosts.usable(now)
        if not self.first_hosts and sum(usable.values()) >= self._plan.num_proc:
            self.first_hosts = set(usable)

    def waited_for(self, now: float) -> list[Worker]:
        """Return the workers that must be ready before the next world."""
        if self._worlds.world is None:
            waited = [each for each in self._workers.living() if each.host in self.first_hosts]
        else:
            waited = self._worlds.living_members()
            if self._waits_for_all(now):
                waited += self._worlds.newcomers()
        self._unwanted = {each.number for each in self._placement.unwanted(now)}
        return [each for each in waited if self._is_late(each)]

    def others_are_late(self) -> bool:
        """Return whether nothing can follow from a worker being ready, as a rank is not.

        Many workers are ready one after another, so this looks at all of them only when the one
        that it found late the last time is late no more. That is the last one: those that were
        started first are mostly ready first.
        """
        reset = self._worlds.reset
        if self._worlds.world is not None and (reset is None or not reset.complete):
            return False
        late = self._one_late
        if late is None or not self._counts(late) or not self._is_late(late):
            workers = filter(self._counts, reversed(self._workers.living()))
            self._one_late = next(filter(self._is_late, workers), None)
        return self._one_late is not None

    def _counts(self, worker: Worker) -> bool:
        """Return whether no next world begins without this worker, if it is wanted."""
        if self._worlds.world is None:
            return worker.living and worker.host in self.first_hosts
        return worker.living and worker.number in self._worlds.member_set

    def _is_late(self, worker: Worker) -> bool:
        """Return whether the next world waits for one of the workers that it could wait for.

        Also for a rank that has to leave: where another one was lost, it may alone hold the last
        commit, and that one may have been lost on the way to the check that all agreed on.
        """
        if worker.ready:
            return False
        reset = self._worlds.reset
        is_rank = worker.number in self._worlds.member_set
        return worker.number not in self._unwanted or (
            is_rank and reset is not None and reset.complete
        )

    def _waits_for_all(self, now: float) -> bool:
        """Return whether the next world waits for all workers that have been started."""
        reset = self._worlds.reset
        if self._plan.admit != WAIT or reset is None:
            return False
        return now < reset.since + self._plan.elastic_timeout

    def vacant(self, now: float) -> int:
        """Return how many workers the next world waits for that have not been started."""
        if self._worlds.world is None:
            vacancies = self._placement.vacancies(now)
            return sum(each.host in self.first_hosts for each in vacancies)
        return len(self._placement.vacancies(now)) if self._waits_for_all(now) else 0

    # -- slots

    def need(self) -> int:
        """Return how many workers the next world needs at least."""
        first = self._worlds.world is None and not any(
            each.stage is Stage.LOST for each in self._workers.ever()
        )
        needed = self._plan.num_proc if first else self._plan.min_np
        return max(1, needed - len(self._worlds.kept()))

    def _missing(self, now: float) -> int:
        """Return how many slots the next world lacks."""
        vacancies = self._placement.vacancies(now)
        there = sum(self._hosts.counts(each.host) for each in vacancies)
        there += len(self._placement.in_expected_order(now))
        return max(0, self.need() - there)

    @property
    def _waiting(self) -> bool:
        return self._worlds.world is None or self._worlds.reset is not None

    def meet(self) -> None:
        self._short_since = self._line_at = None

    # -- time

    def failure(self, now: float) -> str | None:
        """Return how many slots have been missing for longer than the elastic timeout, if any."""
        missing = self._missing(now) if self._waiting else 0
        if not missing:
            # Only a world ends the time: a host that is used again, and fails again, does not.
            if not self._waiting:
                self._short_since = None
            return None
        if self._short_since is None:
            self._short_since = now
        limit = self._plan.elastic_timeout
        if now < self._short_since + limit:
            return None
        return f"{self._short(missing)} for {limit:g} s (--elastic-timeout)"

    def _short(self, missing: int) -> str:
        need = self.need()
        return f"{lines.count(missing, 'slot')} missing ({need - missing} of {need} are there)"

    def tell(self, now: float, say: Callable[[str], None]) -> None:
        """Say every 10 s what the next world waits for."""
        if not self._waiting:
            self._line_at = None
            return
        if self._line_at is None:
            self._line_at = now + LINE_SECONDS
        if now >= self._line_at:
            self._line_at = now + LINE_SECONDS
            say(f"the next world waits for {self._wanted(now)}")

    def _found(self) -> str:
        """Return what discovery shows, for the first world."""
        if self._worlds.world is not None:
            return ""
        if self._hosts.found is None:
            return ", discovery has not answered yet"
        hosts = [f"{host}:{slots}" for host, slots in self._hosts.found.items()]
        return f", discovery shows {lines.cut(hosts) or 'no host'}"

    def _wanted(self, now: float) -> str:
        missing = self._missing(now)
        parts = [f"slots: {self._short(missing)}{self._found()}"] if missing else []
        if late := self.waited_for(now):
            names = lines.names(late, self._worlds.world)
            parts.append(f"workers that have not said ready: {names}")
        ending = [each for each in self._workers if each.ending]
        if killed := [each for each in ending if not each.raised]:
            names = lines.names(killed, self._worlds.world)
            parts.append(
                f"the end of {names}, which {'was' if len(killed) == 1 else 'were'} killed"
            )
        if raised := [each for each in ending if each.raised]:
            names = lines.names(raised, self._worlds.world)
            parts.append(f"the end of {names}, which raised an exception")
        if coming := self._hosts.coming():
            parts.append(f"agents of hosts: {', '.join(coming)}")
        return "; ".join(parts) or "workers that are started again"

    def times(self, now: float) -> list[float]:
        """Return when something changes by the passing of time alone."""
        times = [each for each in (self._line_at,) if each is not None]
        # It may have passed while a host that is used again seemed to have them.
        if self._short_since is not None and now < self._short_since + self._plan.elastic_timeout:
            times.append(self._short_since + self._plan.elastic_timeout)
        reset = self._worlds.reset
        if reset is not None and self._waits_for_all(now):
            times.append(reset.since + self._plan.elastic_timeout)
        return times
