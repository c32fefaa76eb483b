"""What ranks are told when hosts come and go, and when this leads to another world."""

from __future__ import annotations

from hvdlite.common.base.host_update import HostUpdateResult, compare_hosts
from hvdlite.launcher.decisions.commands import WAIT, ElasticPlan
from hvdlite.launcher.decisions.placement import Placement
from hvdlite.launcher.decisions.workers import Stage, Workers
from hvdlite.launcher.decisions.world_changes import WorldChanges

# How long newcomers that are ready wait for others that have been started.
GATHER_SECONDS = 1.0


class HostChanges:
    """The changes of hosts since the last world."""

    def __init__(
        self, plan: ElasticPlan, workers: Workers, placement: Placement, worlds: WorldChanges
    ) -> None:
        self._plan = plan
        self._workers = workers
        self._placement = placement
        self._worlds = worlds
        self._planned: dict[str, int] = {}  # The assignment that the ranks know of.
        self._awaited = False  # Hosts were added, and all ranks are to wait for their workers.
        self._ready_since: float | None = None  # When the first newcomer was ready.

    def tell(self, now: float) -> None:
        """Tell the ranks when the assignment changes because of hosts, and not of failures."""
        if not self._worlds.members or self._worlds.reset is not None:
            return
        planned = self._placement.planned_hosts(now)
        kind = compare_hosts(self._planned, planned)
        if kind:
            self._planned = planned
            self._awaited |= bool(kind & HostUpdateResult.added)
            self._worlds.tell_seen(kind)

    def note_world(self, now: float) -> None:
        self._awaited, self._ready_since = False, None
        self._planned = self._placement.planned_hosts(now)

    def wanted(self, now: float) -> HostUpdateResult:
        """Return how the next world would differ, if it is time to stop at a commit for it."""
        kind = HostUpdateResult.no_update
        if self._worlds.world is None or self._worlds.reset is not None:
            return kind
        if self._placement.unwanted(now):
            kind |= HostUpdateResult.removed
        if self._growth_due(now):
            kind |= HostUpdateResult.added
        return kind

    def counts(self, kind: HostUpdateResult) -> bool:
        """Return whether a reset for this counts.

        What takes the place of a failed worker belongs to the reset after the failure.
        """
        fresh = [each for each in self._worlds.newcomers() if not each.replaces]
        return bool(kind & HostUpdateResult.removed or fresh or self._awaited)

    def _growth_due(self, now: float) -> bool:
        """Return whether newcomers are to be taken in now. A job that ends takes in nobody."""
        members = self._worlds.members
        if any(self._workers[number].stage is Stage.RETURNED for number in members):
            return False
        newcomers = self._worlds.newcomers()
        if self._awaited and self._plan.admit == WAIT:
            return bool(newcomers or self._placement.vacancies(now))
        if not any(each.ready for each in newcomers):
            self._ready_since = None
            return False
        if self._ready_since is None:
            self._ready_since = now
        all_ready = all(each.ready for each in newcomers)
        return all_ready or now >= self._ready_since + GATHER_SECONDS

    def next_time(self) -> float | None:
        """Return until when newcomers that are ready wait for others."""
        return None if self._ready_since is None else self._ready_since + GATHER_SECONDS
