"""How a job ends that has no rank any more."""

from __future__ import annotations

from hvdlite.launcher.decisions.commands import ElasticPlan, Finish
from hvdlite.launcher.decisions.hosts import Hosts
from hvdlite.launcher.decisions.losses import Losses
from hvdlite.launcher.decisions.placement import Placement
from hvdlite.launcher.decisions.workers import Stage, Workers
from hvdlite.launcher.decisions.world_changes import WorldChanges

NO_PREVIOUS_HOSTS = "No hosts from previous set remaining"
NOT_ELASTIC_SCRIPT = (
    "The others ended by this loss, as the script does not go on after one. Remedy: put its "
    "training loop into a function with @hvd.elastic.run (docs/elastic.md); without it, --min-np "
    "has no use"
)


class JobEnd:
    """Finds how a job ends, by what has become of its ranks or of its first workers."""

    def __init__(
        self,
        plan: ElasticPlan,
        hosts: Hosts,
        workers: Workers,
        placement: Placement,
        worlds: WorldChanges,
        losses: Losses,
    ) -> None:
        self._plan = plan
        self._hosts = hosts
        self._workers = workers
        self._placement = placement
        self._worlds = worlds
        self._losses = losses

    def reach(self, now: float) -> Finish | None:
        """Return how the job ends, or None while a rank lives or may still come.

        A job that fails waits for the tracebacks.
        """
        end = self._find_end(now)
        return None if end is not None and end.code and self._losses.unwinding else end

    def _find_end(self, now: float) -> Finish | None:
        worlds = self._worlds
        if worlds.world is None:
            return self._before_the_first_world(now)
        if worlds.living_members():
            return None
        members = [self._workers[number] for number in worlds.members]
        if all(each.done for each in members):
            return self._success()
        if self._losses.members():
            text = f"no rank of world {worlds.world.epoch} is left: {self._losses.text}"
            remedy = f". {NOT_ELASTIC_SCRIPT}" if self._losses.not_handled() else ""
            return Finish(self._losses.code, text + remedy, ())
        if any(each.stage is Stage.RETURNED for each in members):
            return self._success()
        return Finish(1, NO_PREVIOUS_HOSTS, ())

    def _before_the_first_world(self, now: float) -> Finish | None:
        """End the job when its first workers have all ended, or can start nowhere."""
        first = [each for each in self._workers.ever() if not each.replaces]
        if self._workers.living():
            failed = all(each.stage is Stage.LOST and each.by_script for each in first)
            return self._no_start() if len(first) >= self._plan.num_proc and failed else None
        hosts = self._hosts.found or {}
        if self._losses.lost and not any(self._hosts.may_return(host, now) for host in hosts):
            return self._no_start()
        if self._worlds.kept() and not self._placement.vacancies(now):
            return self._no_start() if self._losses.lost else self._success()
        return None

    def _no_start(self) -> Finish:
        return Finish(self._losses.code, f"the job could not start: {self._losses.text}", ())

    def _success(self) -> Finish:
        for worker in (self._workers[number] for number in self._worlds.members):
            if worker.done:
                worker.stage, worker.counts = Stage.RETURNED, True
        return Finish(0, "", self._worlds.results())
