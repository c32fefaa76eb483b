"""The driver of an elastic job: events come in, commands go out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hvdlite.common.base.host_update import HostUpdateResult, compare_hosts
from hvdlite.launcher.elastic.decisions import lines
from hvdlite.launcher.elastic.decisions.commands import Command, DropAgent, Finish, Say, Tell
from hvdlite.launcher.elastic.decisions.cooldowns import FOREVER, Cooldowns
from hvdlite.launcher.elastic.decisions.failures import RESETS_AFTER_EXCEPTIONS, Failure, Failures
from hvdlite.launcher.elastic.decisions.hosts import Hosts
from hvdlite.launcher.elastic.decisions.plan import WAIT, ElasticPlan
from hvdlite.launcher.elastic.decisions.roster import Roster, Stage, Worker
from hvdlite.launcher.elastic.decisions.staffing import Staffing
from hvdlite.launcher.elastic.decisions.succession import Succession
from hvdlite.launcher.elastic.decisions.worlds import NoStateError

# How long a worker may run after its connection has ended, and still return.
CLOSED_SECONDS = 2.0
# How long newcomers that are ready wait for others that have been started.
GATHER_SECONDS = 1.0
LINE_SECONDS = 10.0

RESET_LIMIT_EXCEEDED = "the number of resets exceeded limit {0}"
NO_PREVIOUS_HOSTS = "No hosts from previous set remaining"
NO_STATE = "nobody holds the last commit (number {0}) any more, so the job cannot go on"


class Driver:
    """Decides who is in which world. Every event has the time `now`, in seconds of any clock.

    After each event, or after several: carry out `take()`, in order, and call `tick` at `due()`.
    The first event is a `tick` when the job begins. Events about hosts and workers that the driver
    has dropped are ignored, and so is all that comes after `Finish`.
    """

    def __init__(self, plan: ElasticPlan, uniform: Callable[[], float] = random.random) -> None:
        self.plan = plan
        self._commands: list[Command] = []
        self._finished = False
        self._now = 0.0  # When the last event was.
        self._roster = Roster()
        self._failures = Failures()
        self._hosts = Hosts(Cooldowns(plan.cooldown, uniform), plan.start_timeout)
        order = self._order
        self._staffing = Staffing(plan, self._hosts, self._roster, self._failures, order)
        self._succession = Succession(plan, self._roster, self._staffing, self._failures, order)
        self._first_hosts: set[str] = set()  # Those of the first start; empty before it.
        self._lost: list[Worker] = []  # Since the last world, in the order of their ends.
        self._planned: dict[str, int] = {}  # The assignment that the ranks know of.
        self._awaited = False  # Hosts were added, and all ranks are to wait for their workers.
        self._ready_since: float | None = None  # When the first newcomer was ready.
        self._short_since: float | None = None
        self._line_at: float | None = None
        self._discovery_error = ""

    # -- commands

    def take(self) -> list[Command]:
        """Return the commands since the last call, in the order in which to carry them out."""
        commands = self._commands.copy()
        self._commands.clear()
        return commands

    def due(self) -> float | None:
        """Return when `tick` must be called next, whatever happens; None: not without an event."""
        if self._finished:
            return None
        now = self._now
        reset = self._succession.reset
        times = [
            self._hosts.next_change(now),
            self._staffing.next_time(now),
            self._line_at,
            reset.regroup_at if reset else None,
        ]
        closed = (each.closed_at for each in self._roster.living())
        times += [at + CLOSED_SECONDS for at in closed if at is not None]
        if self._short_since is not None:
            times.append(self._short_since + self.plan.elastic_timeout)
        if self._ready_since is not None:
            times.append(self._ready_since + GATHER_SECONDS)
        if self._waits_for_all(now) and reset is not None:
            times.append(reset.since + self.plan.elastic_timeout)
        return min((at for at in times if at is not None and at > now), default=None)

    # -- events

    def tick(self, now: float) -> None:
        """Let time pass."""
        self._advance(now)

    def discovered(self, hosts: dict[str, int], now: float) -> None:
        """Take the slots of all hosts that are there, in order. No change needs no call."""
        if self._discovery_error:
            self._say("discovery answers again")
            self._discovery_error = ""
        self._hosts.discover(hosts)
        self._advance(now)

    def discovery_failed(self, text: str, now: float) -> None:
        """Note that discovery gave no answer: fatal unless it has given one before."""
        if self._hosts.found is None:
            self._finish(1, f"the first discovery of hosts failed: {text}")
        elif text != self._discovery_error:
            self._discovery_error = text
            self._say(f"discovery failed, so the hosts are taken to be as they were: {text}")
        self._advance(now)

    def agent_came(self, host: str, now: float) -> None:
        """Note that the agent of a host can start workers."""
        self._hosts.came(host)
        self._advance(now)

    def agent_lost(self, host: str, why: str, may_return: bool, now: float) -> None:
        """Note that an agent has ended, is silent or could not be started; `why` is a clause.

        Its workers are lost with it. `may_return`: try to start an agent there again.
        """
        if not self._finished and host in self._hosts.with_agents():
            self._lose_host(host, why, may_return, now)
        self._advance(now)

    def agent_leaving(self, host: str, why: str, now: float) -> None:
        """Note that a host will go: its workers leave at the next commit, as if undiscovered."""
        self._hosts.leave(host, why)
        self._advance(now)

    def worker_said(self, number: int, message: list[Any], now: float) -> None:
        """Take a frame of a worker."""
        worker = self._roster.get(number)
        if worker is None or not worker.living or self._finished:
            return
        match message:
            case ["hello", int()]:
                self._succession.hello(worker, now)
            case ["ready", int(epoch), int(commit)]:
                self._succession.ready(worker, epoch, commit, now)
            case ["gather", int(epoch), int(round_), bytes(body)]:
                self._succession.gather(worker, epoch, round_, body)
                return  # Nothing else follows from it.
            case ["checks", int(counter), int(passed)]:
                self._succession.checks(worker, counter, passed)
        self._advance(now)

    def worker_stopped(self, number: int, now: float) -> None:
        """Note that a worker's process is stopped, by SIGSTOP or the like: it is given up."""
        self.worker_lost(number, "its process was stopped", now)

    def worker_closed(self, number: int, now: float) -> None:
        """Note that a worker's connection has ended. Its process is expected to end, too."""
        worker = self._roster.get(number)
        if worker is not None and worker.living:
            worker.closed_at, worker.ready = now, False
        self._advance(now)

    def worker_ended(
        self, number: int, code: int, cause: str | None, by_signal: bool, now: float
    ) -> None:
        """Note that a worker's process has ended.

        `code` is what a shell would show: 128 + N after signal N, and then `by_signal` is true.
        `cause` is what it raised, or how it was killed, as a clause; None: nothing is known.
        """
        worker = self._roster.get(number)
        if worker is None or not worker.running or self._finished:
            return
        worker.running = False
        if worker.stage is Stage.LEAVING:
            worker.stage = Stage.DISMISSED
        elif worker.living and code == 0:
            self._return(worker)
        elif worker.living:
            spelled = f"killed by signal {code - 128}" if by_signal else f"exit code {code}"
            why = f"{cause} ({spelled})" if cause and not by_signal else cause or spelled
            worker.code = code
            self._lose_worker(worker, why, not by_signal, now)
        self._advance(now)

    def worker_lost(self, number: int, why: str, now: float) -> None:
        """Note that a worker is silent; `why` is a clause. It is out, and killed if need be."""
        worker = self._roster.get(number)
        if worker is not None and worker.living and not self._finished:
            self._give_up(worker, why, now)
        self._advance(now)

    def stop(self, code: int, sentence: str, now: float) -> None:
        """End the job from outside, after Ctrl-C for example."""
        self._finish(code, sentence)

    # -- losses

    def _return(self, worker: Worker) -> None:
        worker.stage = Stage.RETURNED
        succession = self._succession
        worker.counts = worker.number in succession.members or succession.world is None
        succession.leave_out(worker)
        if not worker.counts:
            self._say(f"{lines.name(worker, None)} returned before it was a rank")

    def _give_up(self, worker: Worker, why: str, now: float) -> None:
        sentence = f"{lines.name(worker, self._succession.world)} was given up: {why}"
        self._staffing.give_up(worker, sentence, now)
        self._lose_worker(worker, why, False, now)

    def _lose_worker(self, worker: Worker, why: str, exception: bool, now: float) -> None:
        """Count a failure of a worker and end its world. A host that goes has no failures."""
        host = worker.host
        if self._hosts.shown(host):
            member, epoch = worker.number in self._succession.members, self._epoch
            failure = Failure(host, worker.slot, epoch, now, member, exception)
            self._failures.add(failure)
        self._drop_worker(worker, why, now)
        if not self._hosts.shown(host):
            return
        members = [each for each in self._succession.living_members() if each.host == host]
        if self.plan.failures_by_host:
            self._exclude(host, "one of its workers failed", now)
        elif not members and self._failures.cannot_start(host, now):
            self._exclude(host, "its workers fail as they start", now)

    @property
    def _epoch(self) -> int:
        return self._succession.world.epoch if self._succession.world else 0

    def _drop_worker(self, worker: Worker, why: str, now: float) -> None:
        worker.stage, worker.why, worker.ready = Stage.LOST, why, False
        self._lost.append(worker)
        if worker.number not in self._succession.members:
            self._say(lines.lost([worker], None))
            return
        if self._succession.reset is None:
            self._count_reset()
        self._succession.lose(worker, now)

    def _count_reset(self) -> None:
        self._succession.resets += 1
        limit = self.plan.reset_limit
        if limit is not None and self._succession.resets > limit:
            why = lines.lost(self._lost, self._succession.world) if self._lost else ""
            sentence = RESET_LIMIT_EXCEEDED.format(limit)
            self._finish(1, f"{sentence} (--reset-limit){': ' if why else ''}{why}")

    def _exclude(self, host: str, why: str, now: float) -> None:
        """Give up a host: its other workers are ended, and count for nothing."""
        if self._hosts.cooldowns.excluded(host, now):
            return
        self._hosts.cooldowns.exclude(host, now)
        until = self._hosts.cooldowns.until(host)
        span = "for good" if until == FOREVER else f"for {until - now:.0f} s"
        self._say(f"host {host} is given up {span}: {why}")
        for worker in [each for each in self._roster.on(host) if each.living]:
            self._drop_worker(worker, "its host was given up", now)
        self._staffing.drop_host(host)

    def _lose_host(self, host: str, why: str, may_return: bool, now: float) -> None:
        self._hosts.end(host)
        for worker in self._roster.on(host):
            worker.running = False
            if worker.living:
                self._drop_worker(worker, f"its host was lost: {why}", now)
        if not self._hosts.shown(host):
            return
        if self.plan.failures_by_host or not may_return:
            self._exclude(host, why, now)
        else:
            delay = self._hosts.lose(host, now)
            self._say(f"host {host} was lost: {why}; it is tried again in {delay:.0f} s")

    # -- what follows from an event

    def _advance(self, now: float) -> None:
        """Do all that is due."""
        self._now = now
        for step in (
            self._end_overdue,
            self._start_first,
            self._tell_of_hosts,
            self._dismiss_newcomers,
            self._fill,
            self._finish_if_over,
            self._succession.regroup_if_broken,
            self._publish,
            self._interrupt,
            self._watch_capacity,
            self._say_what_is_missing,
            self._staffing.end_late_ones,
        ):
            if not self._finished:
                step(now)

    def _end_overdue(self, now: float) -> None:
        for host in self._hosts.overdue(now):
            self._order(DropAgent(host))
            why = f"its agent has not come within {self.plan.start_timeout:g} s"
            self._lose_host(host, why, True, now)
        for worker in self._roster.living():
            if worker.closed_at is not None and now >= worker.closed_at + CLOSED_SECONDS:
                self._give_up(worker, "its connection to the driver ended", now)

    def _start_first(self, now: float) -> None:
        usable = self._hosts.usable(now)
        if not self._first_hosts and sum(usable.values()) >= self.plan.num_proc:
            self._first_hosts = set(usable)

    def _tell_of_hosts(self, now: float) -> None:
        """Tell the ranks when the assignment changes because of hosts, and not of failures."""
        if not self._succession.members or self._succession.reset is not None:
            return
        planned = self._staffing.planned_hosts(now)
        kind = compare_hosts(self._planned, planned)
        if kind:
            self._planned = planned
            self._awaited |= bool(kind & HostUpdateResult.added)
            self._succession.tell_seen(kind)

    def _dismiss_newcomers(self, now: float) -> None:
        for worker in self._staffing.unwanted(now):
            if worker.number not in self._succession.members:
                why = self._hosts.why_gone(worker.host)
                self._staffing.dismiss(worker, f"this worker is not needed: {why}", now)

    def _fill(self, now: float) -> None:
        if self._first_hosts:
            self._staffing.fill(now)

    def _finish_if_over(self, now: float) -> None:
        """End the job when no rank lives any more."""
        succession = self._succession
        if succession.world is None:
            self._finish_if_never_begun(now)
            return
        if succession.living_members():
            return
        lost = [each for each in self._lost if each.number in succession.members]
        stages = {self._roster[number].stage for number in succession.members}
        if lost:
            who = lines.lost(lost, succession.world)
            self._finish(self._code(lost), f"no rank of world {self._epoch} is left: {who}")
        elif Stage.RETURNED in stages:
            self._succeed()
        else:
            self._finish(1, NO_PREVIOUS_HOSTS)

    def _finish_if_never_begun(self, now: float) -> None:
        """End the job when its first workers have all ended, or can start nowhere."""
        first = [each for each in self._roster.ever() if not each.replaces]
        if self._roster.living():
            if len(first) >= self.plan.num_proc and all(each.stage is Stage.LOST for each in first):
                self._fail_start()
            return
        hosts = self._hosts.found or {}
        if self._lost and not any(self._hosts.may_return(host, now) for host in hosts):
            self._fail_start()
        elif first and not self._staffing.vacancies(now) and self._succession.kept():
            self._fail_start() if self._lost else self._succeed()

    def _fail_start(self) -> None:
        who = lines.lost(self._lost, None)
        self._finish(self._code(self._lost), f"the job could not start: {who}")

    @staticmethod
    def _code(lost: list[Worker]) -> int:
        return next((each.code for each in lost if each.code), 1)

    # -- the next world

    def _waited_for(self, now: float) -> list[Worker]:
        """Return the workers that must be ready before the next world."""
        unwanted = {each.number for each in self._staffing.unwanted(now)}
        if self._succession.world is None:
            waited = [each for each in self._roster.living() if each.host in self._first_hosts]
        else:
            waited = self._succession.living_members()
            if self._waits_for_all(now):
                waited += self._succession.newcomers()
        return [each for each in waited if not each.ready and each.number not in unwanted]

    def _waits_for_all(self, now: float) -> bool:
        """Return whether the next world waits for all workers that have been started."""
        reset = self._succession.reset
        if self.plan.admit != WAIT or reset is None:
            return False
        return now < reset.since + self.plan.elastic_timeout

    def _vacant(self, now: float) -> int:
        """Return how many workers the next world waits for that have not been started."""
        vacancies = self._staffing.vacancies(now)
        if self._succession.world is None:
            return sum(each.host in self._first_hosts for each in vacancies)
        return len(vacancies) if self._waits_for_all(now) else 0

    def _need(self) -> int:
        """Return how many workers the next world needs at least."""
        first = self._succession.world is None and not self._lost
        needed = self.plan.num_proc if first else self.plan.min_np
        return max(1, needed - len(self._succession.kept()))

    def _publish(self, now: float) -> None:
        succession = self._succession
        reset = succession.reset
        if not self._first_hosts or (succession.world and (reset is None or not reset.complete)):
            return
        if self._waited_for(now) or self._vacant(now) or not self._judge(now):
            return
        staying = self._staffing.in_expected_order(now)
        if succession.world and not any(each.number in succession.members for each in staying):
            self._finish(1, NO_PREVIOUS_HOSTS)
            return
        chosen = [each for each in staying if each.ready][: self.plan.max_np]
        if len(chosen) < self._need():
            return
        cause = self._cause(now)
        leaving = self._staffing.unwanted(now)
        try:
            succession.publish(chosen, cause, now)
        except NoStateError:
            who = lines.lost(self._lost, succession.world)
            sentence = f"{NO_STATE.format(succession.committed)}: {who}"
            self._finish(self._code(self._lost), sentence)
            return
        for worker in leaving:
            why = self._hosts.why_gone(worker.host)
            self._staffing.dismiss(worker, f"this worker is not needed any more: {why}", now)
        self._lost, self._line_at, self._short_since = [], None, None
        self._awaited, self._ready_since = False, None
        self._planned = self._staffing.planned_hosts(now)

    def _cause(self, now: float) -> str:
        """Return why the last world is over."""
        world, reset = self._succession.world, self._succession.reset
        if world is None or reset is None:
            return ""
        parts = [lines.lost(reset.losses, world)] if reset.losses else []
        gone = [each for each in self._staffing.unwanted(now) if each.number in world.members]
        if gone:
            parts.append(lines.removed(gone, world))
        kept = [each for each in self._succession.kept() if each.number in world.members]
        if kept:
            parts.append(lines.returned(kept, world))
        return "; ".join(parts) or ("hosts were added" if reset.kind else "a rank lost its peer")

    def _judge(self, now: float) -> bool:
        """Give up what fails again and again; return whether the next world may begin."""
        if self._failures.script_fails():
            who = lines.lost(self._lost, self._succession.world)
            resets = f"{RESETS_AFTER_EXCEPTIONS} resets without a new commit"
            self._finish(self._code(self._lost), f"the script failed again after {resets}: {who}")
        for host in {each.host: None for each in self._roster.living()}:
            if not self.plan.failures_by_host and self._failures.breaks_worlds(host, now):
                self._exclude(host, "its workers fail without a commit in between", now)
        self._finish_if_over(now)
        return not self._finished

    def _interrupt(self, now: float) -> None:
        """Let the ranks stop at a commit if the next world would have other members."""
        succession = self._succession
        if succession.world is None or succession.reset is not None:
            return
        kind = HostUpdateResult.no_update
        if self._staffing.unwanted(now):
            kind |= HostUpdateResult.removed
        if self._growth_due(now):
            kind |= HostUpdateResult.added
        if not kind:
            return
        fresh = [each for each in succession.newcomers() if not each.replaces]
        if kind & HostUpdateResult.removed or fresh or self._awaited:
            self._count_reset()
        if not self._finished:
            succession.interrupt(kind, now)

    def _growth_due(self, now: float) -> bool:
        """Return whether newcomers are to be taken in now. A job that ends takes in nobody."""
        members = self._succession.members
        if any(self._roster[number].stage is Stage.RETURNED for number in members):
            return False
        newcomers = self._succession.newcomers()
        vacancies = self._staffing.vacancies(now)
        if self._awaited and self.plan.admit == WAIT and (newcomers or vacancies):
            return True
        if not any(each.ready for each in newcomers):
            self._ready_since = None
            return False
        if self._ready_since is None:
            self._ready_since = now
        all_ready = all(each.ready for each in newcomers)
        return all_ready or now >= self._ready_since + GATHER_SECONDS

    # -- what is missing

    def _missing(self, now: float) -> int:
        """Return how many slots the next world lacks."""
        staying = len(self._staffing.in_expected_order(now))
        vacancies = self._staffing.vacancies(now)
        startable = sum(self._hosts.counts(each.host) for each in vacancies)
        if not self._first_hosts:
            staying = 0
        return max(0, self._need() - staying - startable)

    @property
    def _waiting(self) -> bool:
        return self._succession.world is None or self._succession.reset is not None

    def _watch_capacity(self, now: float) -> None:
        """End the job when slots have been missing for longer than the elastic timeout."""
        missing = self._missing(now) if self._waiting else 0
        if not missing:
            self._short_since = None
            return
        if self._short_since is None:
            self._short_since = now
        if now >= self._short_since + self.plan.elastic_timeout:
            self._finish(1, f"{self._short(missing)} for {self.plan.elastic_timeout:g} s "
                            "(--elastic-timeout)")  # fmt: skip

    def _short(self, missing: int) -> str:
        have = self._need() - missing
        return f"{lines.count(missing, 'slot')} missing ({have} of {self._need()} are there)"

    def _say_what_is_missing(self, now: float) -> None:
        if not self._waiting:
            self._line_at = None
            return
        if self._line_at is None:
            self._line_at = now + LINE_SECONDS
        if now < self._line_at:
            return
        self._line_at = now + LINE_SECONDS
        self._say(f"the next world waits for {self._wanted(now)}")

    def _wanted(self, now: float) -> str:
        missing = self._missing(now)
        late = [lines.name(each, self._succession.world) for each in self._waited_for(now)]
        parts = [f"slots: {self._short(missing)}"] if missing else []
        if late:
            parts.append(f"workers that have not said ready: {', '.join(late)}")
        coming = self._hosts.coming()
        if coming:
            parts.append(f"agents of hosts: {', '.join(coming)}")
        return "; ".join(parts) or "workers that are started again"

    # -- the end

    def _order(self, command: Command) -> None:
        """Add a command; nothing comes after the end of the job."""
        if not self._finished:
            self._commands.append(command)

    def _succeed(self) -> None:
        self._finish(0, "", self._succession.results())

    def _finish(self, code: int, sentence: str, results: tuple[int, ...] = ()) -> None:
        numbers = tuple(each.number for each in self._roster.living() if each.greeted)
        if numbers:
            self._order(Tell(numbers, ["end", code, sentence or "the job has ended"]))
        self._order(Finish(code, sentence, results))
        self._finished = True

    def _say(self, line: str) -> None:
        self._order(Say(line))
