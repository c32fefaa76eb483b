"""The driver of an elastic job: events come in, commands go out."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.common.driver_link import frames
from hvdlite.launcher.decisions import lines
from hvdlite.launcher.decisions.commands import Command, ElasticPlan, Finish, Say, Tell
from hvdlite.launcher.decisions.failures import RESETS_AFTER_EXCEPTIONS, Cooldowns, Failures
from hvdlite.launcher.decisions.hosts import Hosts
from hvdlite.launcher.decisions.losses import NO_PREVIOUS_HOSTS, Losses
from hvdlite.launcher.decisions.placement import Parts, Placement
from hvdlite.launcher.decisions.requirements import Requirements
from hvdlite.launcher.decisions.workers import NoStateError, Stage, Worker, Workers
from hvdlite.launcher.decisions.world_changes import HostChanges, WorldChanges

RESET_LIMIT_EXCEEDED = "the number of resets exceeded limit {0}"
NO_STATE = "nobody holds the last commit (number {0}) any more, so the job cannot go on"

# Beyond so many hosts, workers are started for several agents at once, and so late for each host:
# whoever looks for what to start looks at all of them.
FEW_HOSTS, HOST_SECONDS = 64, 5e-4


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
        self._is_late = False  # What follows from it has not been done.
        self._due: float | None = None  # The time of `due`, if it is known since the last event.
        self._due_is_known = False
        self._follow_at: float | None = None  # When what follows from agents is done.
        self._workers = Workers()
        self._failures = Failures()
        cooldowns = Cooldowns(plan.cooldown, uniform)
        self._hosts = Hosts(cooldowns, plan.host_timeout_seconds)
        parts = Parts(plan, self._hosts, self._workers, self._failures, self._order)
        self._placement = Placement(parts)
        self._worlds = WorldChanges(parts, self._placement)
        self._losses = Losses(parts, self._placement, self._worlds)
        self._requirements = Requirements(parts, self._placement, self._worlds)
        self._changes = HostChanges(parts, self._placement, self._worlds)
        self._discovery_error = ""
        self._held: set[str] = set()  # Hosts that have gone, and whose ranks stay, as was told.

    # -- commands

    def take(self) -> list[Command]:
        """Return the commands since the last call, in the order in which to carry them out."""
        self._advance_if_late()
        commands = self._commands.copy()
        self._commands.clear()
        return commands

    def due(self) -> float | None:
        """Return when `tick` must be called next, whatever happens; None: not without an event."""
        self._advance_if_late()
        if self._finished:
            return None
        if not self._due_is_known:
            now, reset = self._now, self._worlds.reset
            times = [
                self._hosts.next_change(now),
                self._placement.next_time(now),
                self._losses.next_time(),
                self._follow_at,
                self._changes.next_time(),
                reset.regroup_at if reset else None,
                *self._requirements.times(now),
            ]
            self._due = min((at for at in times if at is not None and at > now), default=None)
            self._due_is_known = True
        return self._due

    # -- events

    def tick(self, now: float) -> None:
        """Let time pass."""
        self._advance(now)

    def discovered(self, hosts: dict[str, int], now: float) -> None:
        """Take the slots of all hosts that are there, in order. No change needs no call.

        Where there were hosts, an answer without any is none: a file that is being rewritten is
        empty for a moment, and whoever wants to end the job has other ways.
        """
        if self._hosts.found and not any(hosts.values()):
            self.discovery_failed("it shows no host", now)
            return
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
        hosts = len(self._hosts.found or ())
        if hosts <= FEW_HOSTS or not self._hosts.coming():
            self._advance_later(now)
        elif self._follow_at is None:
            self._follow_at, self._due_is_known = now + HOST_SECONDS * hosts, False

    def agent_lost(
        self, host: str, why: str, may_return: bool, now: float, *, ended: bool = False
    ) -> None:
        """Note that an agent has ended, is silent or could not be started; `why` is a clause.

        Its workers are lost with it. `may_return`: try to start an agent there again. `ended`:
        their processes run no more, so that it may be tried soon.
        """
        if not self._finished and host in self._hosts.with_agents():
            self._losses.lose_host(host, why, may_return, now, ended=ended)
        self._advance(now)

    def agent_leaving(self, host: str, why: str, now: float) -> None:
        """Note that a host will go: its workers leave at the next commit, as if undiscovered.

        It is tried again some time after that, unless discovery no longer shows it.
        """
        there = host in self._hosts.with_agents()
        seconds = self._hosts.leave(host, why) if there else None
        if seconds is not None:
            again = f"it is tried again {seconds:.0f} s after that"
            self._say(f"host {host} leaves at the next commit: {why}; {again}")
        self._advance(now)

    def worker_said(self, number: int, message: list[Any], now: float) -> None:
        worker = self._workers.get(number)
        if worker is None or not worker.living or self._finished:
            return
        together = False  # Whether all workers say it at about the same time.
        match message:
            case [frames.HELLO, int()]:
                together = True
                self._worlds.hello(worker, now)
            case [frames.READY, int(epoch), int(commit)]:
                self._worlds.ready(worker, epoch, commit, now)
            case [frames.GATHER, int(epoch), int(round_), bytes(body)]:
                self._worlds.gather(worker, epoch, round_, body)
                return  # Nothing else follows from it.
            case [frames.CHECKS, int(counter), int(passed)]:
                together = True
                self._worlds.checks(worker, counter, passed)
            case [frames.LATE, int(epoch), [*late]]:
                self._losses.give_up_late(epoch, late, now)
            case [frames.ERROR, int(epoch), str(text)]:
                self._worlds.note_error(worker, epoch, text)
                return  # It is ready next.
            case [frames.BYE]:
                together = worker.said_bye = True
        if self._requirements.others_are_late():
            return
        if together:
            self._advance_later(now)
        else:
            self._advance(now)

    def worker_closed(self, number: int, now: float) -> None:
        """Note that a worker's connection has ended. Its process is expected to end, too."""
        worker = self._workers.get(number)
        if worker is not None and worker.living:
            worker.closed_at, worker.ready = now, False
        self._advance(now)

    def worker_raised(self, number: int, cause: str, now: float) -> None:
        """Note that an exception ends a worker, whose process may take its time to end.

        `cause` is the exception as a clause. The worker is lost for its world from now on;
        `worker_ended` follows.
        """
        worker = self._workers.get(number)
        if worker is not None and worker.living and not self._finished:
            self._losses.leave_by_exception(worker, cause, now)
        self._advance(now)

    def worker_ended(
        self, number: int, code: int, cause: str | None, by_signal: bool, now: float
    ) -> None:
        """Note that a worker's process has ended.

        `code` is what a shell would show: 128 + N after signal N, and then `by_signal` is true.
        `cause` is what it raised, or how it was killed, as a clause; None: nothing is known.
        """
        worker = self._take_end(number)
        if worker is None:
            return
        if worker.living and code == 0:
            worker.stage = Stage.RETURNED
            worlds = self._worlds
            worker.counts = worker.number in worlds.members or worlds.world is None
            worlds.leave_out(worker)
            if not worker.counts:
                self._say(f"{lines.name(worker, None)} returned before it was a rank")
        elif worker.living:
            self._losses.end(worker, code, cause, by_signal, now)
        elif worker.raised:
            self._losses.note_code(worker, code)
        self._advance(now)

    def worker_lost(self, number: int, why: str, now: float) -> None:
        """Note that a worker is silent or stopped; `why` is a clause. It is out, and killed."""
        worker = self._workers.get(number)
        if worker is not None and worker.living and not self._finished:
            self._losses.give_up(worker, why, now)
        self._advance(now)

    def worker_refused(self, number: int, why: str, now: float) -> None:
        """Note that the host of a worker has nothing for it, so that no process was started.

        `why` is a clause about its slot. It holds for the higher slots, too.
        """
        worker = self._take_end(number)
        if worker is None:
            return
        self._losses.refuse(worker, why, now)
        self._advance(now)

    def _take_end(self, number: int) -> Worker | None:
        """Note that a process runs no more; return the worker, unless that was known."""
        worker = self._workers.get(number)
        if worker is None or not worker.running or self._finished:
            return None
        worker.running = False
        if worker.stage is Stage.LEAVING:
            worker.stage = Stage.DISMISSED
        return worker

    def stop(self, code: int, sentence: str, now: float) -> None:
        """End the job from outside, after Ctrl-C for example; who does that says why."""
        self._finish(code, sentence, told="")

    # -- what follows from an event

    def _advance_later(self, now: float) -> None:
        """Do all that is due when the next event of another kind comes, or commands are taken.

        Hundreds of such events come together as a job starts, and each would look at all workers.
        """
        self._now, self._is_late = now, True

    def _advance_if_late(self) -> None:
        if self._is_late:
            self._advance(self._now)

    def _advance(self, now: float) -> None:
        self._now, self._is_late, self._due_is_known = now, False, False
        self._follow_at = None
        for step in (
            self._losses.give_up_closed,
            self._requirements.start_first,
            self._changes.tell,
            self._tell_of_last_holders,
            self._dismiss_newcomers,
            self._fill,
            self._end_reset_beyond_limit,
            self._finish_if_over,
            self._worlds.regroup_if_broken,
            self._publish,
            self._interrupt,
            self._watch,
            self._placement.end_late_ones,
        ):
            if not self._finished:
                step(now)

    def _tell_of_last_holders(self, now: float) -> None:
        hosts = {each.host: None for each in self._placement.last_holders(now)}
        for host in hosts:
            if host not in self._held:
                why = self._hosts.why_gone(host)
                self._say(f"host {host} is kept until another one has the state: {why}")
        self._held = set(hosts)

    def _dismiss_newcomers(self, now: float) -> None:
        for worker in self._placement.unwanted(now):
            if worker.number not in self._worlds.members:
                self._dismiss([worker], now)

    def _dismiss(self, workers: Sequence[Worker], now: float) -> None:
        for worker in workers:
            why = self._hosts.why_gone(worker.host)
            self._placement.dismiss(worker, f"this worker is not needed any more: {why}", now)

    def _fill(self, now: float) -> None:
        if self._requirements.first_hosts:
            self._placement.fill(now)

    def _end_reset_beyond_limit(self, now: float) -> None:
        limit, reset = self.plan.reset_limit, self._worlds.reset
        if reset is not None and reset.regroup_at is not None and now < reset.regroup_at:
            return  # A rank has left its world, and who was lost is known in a moment.
        end = self._losses.job_end(now)
        if end is not None and end.code == 0:
            return
        if self._beyond_limit and not self._losses.unwinding:
            sentence = f"{RESET_LIMIT_EXCEEDED.format(limit)} (--reset-limit)"
            why = self._losses.text
            self._finish(1, f"{sentence}: {why}" if why else sentence)

    @property
    def _beyond_limit(self) -> bool:
        limit = self.plan.reset_limit
        return limit is not None and self._worlds.resets > limit

    def _watch(self, now: float) -> None:
        if why := self._requirements.failure(now):
            self._finish(1, why)
        self._requirements.tell(now, self._say)

    # -- the next world

    def _publish(self, now: float) -> None:
        worlds, requirements = self._worlds, self._requirements
        running = worlds.world and not (worlds.reset and worlds.reset.complete)
        if running or not requirements.first_hosts:
            return
        if requirements.waited_for(now) or requirements.vacant(now) or not self._judge(now):
            return
        staying = self._placement.in_expected_order(now)
        if worlds.world and not any(each.number in worlds.members for each in staying):
            if not self._losses.unwinding:
                self._finish(1, NO_PREVIOUS_HOSTS)
            return
        chosen = self._placement.in_next_world(now)
        if len(chosen) < requirements.need():
            return
        holders = self._placement.last_holders(now)
        leaving = [each for each in self._placement.unwanted(now) if each not in chosen]
        leaving += [each for each in holders if each not in chosen]
        try:
            worlds.publish(chosen, leaving, now)
        except NoStateError:
            if not self._losses.unwinding:
                sentence = f"{NO_STATE.format(worlds.committed)}: {self._losses.text}"
                self._finish(self._losses.code, sentence)
            return
        self._dismiss(leaving, now)
        self._losses.lost = []
        requirements.meet()
        self._changes.note_world(now)

    def _judge(self, now: float) -> bool:
        """Give up what fails again and again; return whether the next world may begin."""
        error = self._worlds.error()
        if error and self._worlds.world:
            self._failures.note_error(self._worlds.world.epoch)
        fails = self._failures.script_fails()
        if self._losses.unwinding and (fails or self._beyond_limit):
            return False  # The job ends with the traceback, and with the exit code.
        if fails:
            resets = f"{RESETS_AFTER_EXCEPTIONS} resets without a new commit"
            sentence = f"the script failed again after {resets}: {self._losses.text or error}"
            self._finish(self._losses.code, sentence)
            return False
        self._losses.exclude_unreliable_hosts(now)
        self._finish_if_over(now)
        return not self._finished

    def _interrupt(self, now: float) -> None:
        """Let the ranks stop at a commit if the next world would have other members."""
        kind = self._changes.wanted(now)
        if kind and self._changes.counts(kind):
            self._worlds.resets += 1
            self._end_reset_beyond_limit(now)
        if kind and not self._finished:
            self._worlds.interrupt(kind, now)

    # -- the end

    def _finish_if_over(self, now: float) -> None:
        """End the job when no rank lives any more."""
        end = self._losses.job_end(now)
        if end is not None:
            if end.code == 0 and self._losses.members():
                self._say(f"the job is done: {self._losses.text} after its script was done")
            self._finish(end.code, end.sentence, end.results)

    def _order(self, command: Command) -> None:
        """Add a command; nothing comes after the end of the job."""
        if not self._finished:
            self._commands.append(command)

    def _finish(
        self, code: int, sentence: str, results: tuple[int, ...] = (), told: str | None = None
    ) -> None:
        """End the job. Workers print what they are `told`; by default that is the sentence."""
        numbers = tuple(each.number for each in self._workers.living() if each.greeted)
        if numbers:
            words = (sentence or "the job has ended") if told is None else told
            self._order(Tell(numbers, [frames.END, code, words]))
        self._order(Finish(code, sentence, results))
        self._finished = True

    def _say(self, line: str) -> None:
        self._order(Say(line))
