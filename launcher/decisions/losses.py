"""Workers and hosts that are lost: who goes with them, and what counts as a failure of whom."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.launcher.decisions import lines
from hvdlite.launcher.decisions.commands import DropAgent, Finish, Say
from hvdlite.launcher.decisions.failures import FOREVER, SlotFailure
from hvdlite.launcher.decisions.placement import Parts, Placement
from hvdlite.launcher.decisions.workers import Stage, Worker
from hvdlite.launcher.decisions.world_changes import WorldChanges

# How long a process may run on after its connection has broken: the kernel takes a while to end one
# that has much memory, or writes a core dump.
CLOSED_SECONDS = 5.0
# How long the process of a worker may run on after an exception, and
# how long the next world waits for a worker that has said bye and still runs: it may return, and
# frameworks take seconds to end on a busy machine. While nobody waits for it, it has no limit.
BYE_SECONDS = 30.0

EXCEPTION_CODE = 1  # Of a process of Python that an exception ends.
LOSS_ERROR = "HorovodInternalError"  # What a rank raises when it has lost another one.
STALLED = "it was late for a tensor for longer than HVDLITE_STALL_SHUTDOWN_TIME_SECONDS"
NO_PREVIOUS_HOSTS = "No hosts from previous set remaining"
NOT_ELASTIC_SCRIPT = (
    "The others ended by this loss, as the script does not go on after one. Remedy: put its "
    "training loop into a function with @hvd.elastic.run (docs/elastic.md); without it, --min-np "
    "has no use"
)


class Losses:
    """The workers that were lost since the last world, in the order of their ends."""

    def __init__(self, parts: Parts, placement: Placement, worlds: WorldChanges) -> None:
        self._plan, self._hosts, self._workers = parts.plan, parts.hosts, parts.workers
        self._failures, self._order = parts.failures, parts.order
        self._placement, self._worlds = placement, worlds
        self.lost: list[Worker] = []

    @property
    def code(self) -> int:
        """The exit code of the first worker that has one, else 1."""
        return next((each.code for each in self.lost if each.code), 1)

    @property
    def text(self) -> str:
        """Who was lost and why, for the end of the job."""
        return lines.ended(self.lost, self._worlds.world)

    def members(self) -> list[Worker]:
        """Return the lost ranks of the last world."""
        return [each for each in self.lost if each.number in self._worlds.members]

    # -- workers

    def end(
        self, worker: Worker, code: int, cause: str | None, by_signal: bool, now: float
    ) -> None:
        spelled = f"killed by signal {code - 128}" if by_signal else f"{lines.EXIT_CODE} {code}"
        why = _raised(cause, code) if cause and not by_signal else cause or spelled
        worker.code = code
        self.lose(worker, why, not by_signal, now)

    def leave_by_exception(self, worker: Worker, cause: str, now: float) -> None:
        """Note that an exception ends a living worker; its process has not ended yet."""
        worker.raised, worker.code = True, EXCEPTION_CODE
        worker.kill_at, worker.terminate_at = now + BYE_SECONDS, None
        self.lose(worker, _raised(cause, EXCEPTION_CODE), True, now)

    def refuse(self, worker: Worker, why: str, now: float) -> None:
        """Note that a host has nothing for a worker, such as a device: its slot is not used again.

        A host without a rank is given up: who has listed too many slots should know at once. Of a
        worker that was to leave meanwhile, the slot is remembered.
        """
        host = worker.host
        ranks = [each for each in self._worlds.living_members() if each.host == host]
        if worker.living and not ranks:
            self._order(DropAgent(host))
            self.lose_host(host, f"it cannot start its ranks: {why}", False, now)
            return
        slots = max(worker.slot, len(ranks))
        if worker.living:
            self._drop(worker, why, now, said=True)
        if slots and self._hosts.limit(host, slots):
            at_most = f"{lines.count(slots, 'slot')} at most"
            self._order(Say(f"host {host} is used with {at_most} from now on: {why}"))

    def note_code(self, worker: Worker, code: int) -> None:
        """Note the exit code of a worker that was lost by an exception before."""
        was_killed = worker.kill_at is None
        if code and not was_killed:
            worker.why = worker.why.removesuffix(_raised("", worker.code)) + _raised("", code)
            worker.code = code

    @property
    def unwinding(self) -> bool:
        """Whether the process of a worker has not ended yet that an exception ends.

        A job that fails waits for it, at most `BYE_SECONDS`.
        """
        return any(each.unwinding for each in self._workers)

    def give_up(self, worker: Worker, why: str, now: float) -> None:
        """Count a worker out whose process may still run."""
        sentence = f"{lines.name(worker, self._worlds.world)} was given up: {why}"
        self._placement.give_up(worker, sentence)
        self.lose(worker, why, False, now)

    def give_up_late(self, epoch: int, numbers: Sequence[int], now: float) -> None:
        """Count out the ranks of the world `epoch` that the others have waited for too long."""
        world = self._worlds.world
        if world is None or world.epoch != epoch:
            return
        for worker in self._worlds.living_members():
            if worker.number in numbers and not worker.ready:
                self.give_up(worker, STALLED, now)

    def lose(self, worker: Worker, why: str, exception: bool, now: float) -> None:
        """Count a failure of a worker and end its world. A host that goes has no failures."""
        host, worlds = worker.host, self._worlds
        worker.by_script = exception
        epoch = worlds.world.epoch if worlds.world else 0
        if not self._hosts.shown(host, now):
            self._drop(worker, why, now)
            return
        member = worker.number in worlds.members
        self._failures.add(SlotFailure(host, worker.slot, epoch, now, member, exception))
        self._drop(worker, why, now)
        ranks = [each for each in worlds.living_members() if each.host == host]
        if self._plan.failures_by_host:
            self.exclude(host, "one of its workers failed", now)
        elif not ranks and self._failures.cannot_start(host, now):
            self.exclude(host, "its workers fail as they start", now)

    def _drop(self, worker: Worker, why: str, now: float, *, said: bool = False) -> None:
        worker.stage, worker.why, worker.ready = Stage.LOST, why, False
        self.lost.append(worker)
        if worker.number in self._worlds.members:
            self._worlds.lose(worker, now)
        elif not said:
            self._order(Say(lines.lost([worker], None)))

    def give_up_closed(self, now: float) -> None:
        """Count out the workers that run on for too long after their connections have ended."""
        for worker in self._workers.living():
            limit = self._end_limit(worker)
            if limit is not None and now >= limit:
                self.give_up(worker, "its connection to the driver ended", now)

    def _end_limit(self, worker: Worker) -> float | None:
        """Return when a worker that has no connection must have ended; None: whenever it likes."""
        if worker.closed_at is None:
            return None
        if not worker.said_bye:
            return worker.closed_at + CLOSED_SECONDS
        reset = self._worlds.reset
        return max(worker.closed_at, reset.since) + BYE_SECONDS if reset is not None else None

    # -- hosts

    def exclude(self, host: str, why: str, now: float) -> None:
        """Give up a host: its other workers are ended, and count for nothing."""
        cooldowns = self._hosts.cooldowns
        if cooldowns.excluded(host, now):
            return
        cooldowns.exclude(host, now)
        until = cooldowns.until(host)
        span = "for good" if until == FOREVER else f"for {until - now:.0f} s"
        self._order(Say(f"host {host} is given up {span}: {why}"))
        for worker in self._workers.on(host):
            if worker.living:
                self._drop(worker, "its host was given up", now, said=True)
        self._placement.drop_host(host, now)

    def lose_host(
        self, host: str, why: str, may_return: bool, now: float, *, ended: bool = False
    ) -> None:
        """Lose all workers of a host whose agent has gone, and try it again later if it may be.

        `ended`: the processes of its workers have ended with it.
        """
        self._hosts.end(host, now)
        shown = self._hosts.shown(host, now)
        orphans = not ended and any(worker.running for worker in self._workers.on(host))
        for worker in self._workers.on(host):
            worker.running = False
            if worker.living:  # The host has a line of its own below.
                self._drop(worker, f"its host was lost: {why}", now, said=shown)
        if orphans:  # Also where discovery does not show the host: it may in a moment.
            self._hosts.await_orphans(host, now)
        if not shown:
            return
        if self._plan.failures_by_host or not may_return:
            self.exclude(host, why, now)
        else:
            delay = self._hosts.lose(host, now)
            worlds = self._worlds
            if worlds.world is None or worlds.living_members():
                again = f"; it is tried again in {delay:.0f} s"
            else:  # The job ends with its last rank.
                again = ""
            self._order(Say(f"host {host} was lost: {why}{again}"))

    def exclude_unreliable_hosts(self, now: float) -> None:
        """Give up the hosts that break world after world."""
        for host in {each.host: None for each in self._workers.living()}:
            if not self._plan.failures_by_host and self._failures.breaks_worlds(host, now):
                self.exclude(host, "its workers fail without a commit in between", now)

    def next_time(self) -> float | None:
        """Return when a worker has had its time to end after its connection."""
        limits = (self._end_limit(each) for each in self._workers.living())
        return min((limit for limit in limits if limit is not None), default=None)

    # -- how a job ends that has no rank any more

    def job_end(self, now: float) -> Finish | None:
        """Return how the job ends, or None while a rank lives or may still come.

        A job that fails waits for the tracebacks.
        """
        end = self._find_end(now)
        return None if end is not None and end.code and self.unwinding else end

    def _find_end(self, now: float) -> Finish | None:
        worlds = self._worlds
        if worlds.world is None:
            return self._before_the_first_world(now)
        if worlds.living_members():
            return None
        members = [self._workers[number] for number in worlds.members]
        if all(each.done for each in members):
            return self._success()
        if lost := self.members():
            text = f"no rank of world {worlds.world.epoch} is left: {self._last_words(members)}"
            # Whether ranks ended by the loss of another one, which elastic loops handle.
            followed = [each.why.startswith(LOSS_ERROR) for each in lost]
            remedy = f". {NOT_ELASTIC_SCRIPT}" if any(followed) and not followed[0] else ""
            return Finish(self.code, text + remedy, ())
        if any(each.stage is Stage.RETURNED for each in members):
            return self._success()
        return Finish(1, NO_PREVIOUS_HOSTS, ())

    def _last_words(self, members: Sequence[Worker]) -> str:
        """Return who was lost and why, and which of the members were done before that."""
        world, done = self._worlds.world, [each for each in members if each.done]
        lost = [each for each in self.lost if not each.done]
        if world is None or not done or not lost:
            return self.text
        who = lines.ranks_are([world.rank(each.number) for each in done])
        return (
            f"{who} done, as the script has ended there; {lines.ended(lost, world)}, before the "
            "script had ended there, and nobody is left that could go on instead"
        )

    def _before_the_first_world(self, now: float) -> Finish | None:
        """End the job when its first workers have all ended, or can start nowhere."""
        first = [each for each in self._workers.ever() if not each.replaces]
        if self._workers.living():
            failed = all(each.stage is Stage.LOST and each.by_script for each in first)
            return self._no_start() if len(first) >= self._plan.num_proc and failed else None
        hosts = self._hosts.found or {}
        if self.lost and not any(self._hosts.may_return(host, now) for host in hosts):
            return self._no_start()
        if self._worlds.kept() and not self._placement.vacancies(now):
            return self._no_start() if self.lost else self._success()
        return None

    def _no_start(self) -> Finish:
        return Finish(self.code, f"the job could not start: {self.text}", ())

    def _success(self) -> Finish:
        for worker in (self._workers[number] for number in self._worlds.members):
            if worker.done:
                worker.stage, worker.counts = Stage.RETURNED, True
        return Finish(0, "", self._worlds.results())


def _raised(cause: str, code: int) -> str:
    return f"{cause} ({lines.EXIT_CODE} {code})"
