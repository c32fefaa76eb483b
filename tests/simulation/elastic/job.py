"""An elastic job in a world: the driver decides, and workers train, commit, sync, die and return.

Driver and launcher are the real ones, with the worker's agreement on checks. Hosts, agents and
workers are played: a worker's training is a number to which each step adds. A step is a collective
of its world, so a loss ends it on all ranks.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from hvdlite.launcher.command_line.job_kinds import ElasticOptions
from hvdlite.launcher.decisions.commands import Finish
from tests.simulation.elastic.agents import around, new_launcher
from tests.simulation.elastic.collectives import Collectives
from tests.simulation.elastic.hosts import AgentProcess, Leader
from tests.simulation.elastic.network import Network
from tests.simulation.elastic.programs import (
    FROM_LAUNCHER,
    SILENCE_SECONDS,
    TO_LAUNCHER,
    ElasticProgram,
    Happening,
)
from tests.simulation.elastic.wires import Wires, come
from tests.simulation.elastic.workers import Worker
from tests.simulation.start.visitors import Guest
from tests.simulation.world import BrokenError, World

STEPS, PROGRESS, ENDS = (
    "no committed step is lost while a rank that held it lives",
    "nobody waits for what can never come",
    "the job ends by the rules",
)
LEFT = "no process, file or descriptor is left"
LIMIT_SECONDS = 2000.0  # Of virtual time: a job that has not ended by then never will.
# By so much the launcher's clock is ahead at most: less than agents have to end.
MOST_AHEAD_SECONDS = 3.5
LOOK_SECONDS = 0.1  # Between two looks of the launcher at what is silent.
HANG_SECONDS = 1.7  # Of silence, of which an agent tells: more than a beat and a long pause.
KILLED = -9
LEFT_SECONDS = 20.0  # After the end of the job, in which agents end.


class ElasticJob:
    """The driver with its hosts and workers."""

    def __init__(self, program: ElasticProgram) -> None:
        self.program = program
        self.world = World(program.seed)
        self.broken: BrokenError | None = None
        self.workers: dict[int, Worker] = {}
        self.collectives = Collectives(self.world, self.workers)
        self.network = Network(self.world, program.bytes_per_second)
        self.wires = Wires(self.world) if program.proves else None
        self.guests: list[Guest] = []
        self.agents: list[AgentProcess] = []  # All that have come, also those that were given up.
        self.leaders: list[Leader] = []  # What has led to them, as ssh does.
        self.folders: set[tuple[str, str]] = set()  # Of agents, by host.
        self.unreached: set[tuple[str, str]] = set()  # Folders that were to be removed in vain.
        self.here: AgentProcess  # The one that does something.
        self._shown: dict[str, int] = {}
        self._early: set[int] = set()  # Workers that have returned before the last step.
        self._frozen: list[Callable[[], None]] | None = None  # What the launcher has yet to do.
        self._ahead = 0.0  # By how much its clock is ahead.
        self._ticks = 0

    def run(self) -> None:
        """Run the job. Raises `BrokenError`."""
        with around(self), self.wires.around() if self.wires is not None else nullcontext():
            try:
                self._run()
            finally:
                for guest in self.guests:
                    guest.node.kill()

    def _run(self) -> None:
        program = self.program
        options = ElasticOptions(
            num_proc=program.min_np, min_np=program.min_np, max_np=program.max_np,
            cooldown=(1, 4), elastic_timeout=60.0, admit=program.admit,
            failures_by_host=program.failures_by_host, host_timeout_seconds=SILENCE_SECONDS,
            worker_timeout_seconds=HANG_SECONDS,
        )  # fmt: skip
        self.launcher = new_launcher(self, options)
        self.driver = self.launcher.driver
        self.wake(lambda: None)
        self._show(dict(program.hosts))
        for happening in program.happenings:
            self.world.after(happening.at, lambda each=happening: self._happen(each))  # type: ignore[misc]
        for visitor in program.visitors:
            self.world.after(visitor.at, partial(come, self, visitor))
        # In the end all hosts of the beginning are there again.
        last = max((each.at + each.seconds for each in program.happenings), default=0.0)
        self.world.after(last + 10.0, self._heal)
        self.world.after(LIMIT_SECONDS, self._give_up)
        self.world.after(LOOK_SECONDS * self.world.lot.random(), self._look)
        self.world.run(lambda: self.launcher.finish is not None)
        assert self.launcher.finish is not None
        self._check_end(self.launcher.finish)
        self._check_left()

    def tell(self, who: str, what: str) -> None:
        """Add to the story."""
        self.world.tell(who, what)

    # -- the launcher's loop

    def clock(self) -> float:
        """Return the launcher's time."""
        return self.world.clock() + self._ahead

    def wake(self, action: Callable[[], None]) -> None:
        """Let something happen to the launcher, when it runs, and let it do what follows."""
        if self.launcher.finish is not None:
            return
        if self._frozen is not None:
            self._frozen.append(action)
            return
        action()
        self.launcher.carry_out()
        self._set_timer()

    def _thaw(self) -> None:
        actions, self._frozen = self._frozen or [], None
        for action in actions:
            self.wake(action)

    def _set_timer(self) -> None:
        due = None if self.launcher.finish is not None else self.driver.due()
        self._ticks += 1
        if due is not None:
            ticks = self._ticks
            delay = max(0.0, due - self._ahead - self.world.now) + 1e-6
            self.world.after(delay, lambda: self._tick(ticks))

    def _tick(self, ticks: int) -> None:
        if ticks == self._ticks:
            self.wake(lambda: self.driver.tick(self.clock()))

    def _look(self) -> None:
        self.wake(lambda: self.launcher.look(self.clock()))
        self.world.after(LOOK_SECONDS, self._look)

    # -- what happens

    def _happen(self, happening: Happening) -> None:
        living = [each for each in self.workers.values() if each.lives]
        kind, host, seconds = happening.kind, happening.host, happening.seconds
        if kind in ("kill", "stop", "raise", "pause", "hang", "close", "return", "late"):
            if living:
                self._strike(kind, living[happening.which % len(living)], seconds)
            return
        match kind:
            case "lose" if host not in self.network.down:
                self._lose_host(host)
            case "restore":
                self.network.down.discard(host)
            case "show":
                self._show(dict(happening.hosts))
            case "leaving" | "fell":
                for agent in self._agents_of(host):
                    self._strike_agent(kind, agent)
            case "stall":
                ways = {TO_LAUNCHER: "to", FROM_LAUNCHER: "from"}.get(happening.way, "to and from")
                text = f"sends nothing {ways} the launcher for {seconds:.3f} s"
                self.tell(f"host {host}", text)
                self.network.stall(host, happening.way, seconds)
            case "part":
                self.tell(f"host {host}", f"does not reach {happening.other} for {seconds:.3f} s")
                self.collectives.part(host, happening.other, seconds)
            case "freeze" if self._frozen is None:
                self.tell("launcher", f"is stopped for {seconds:.3f} s")
                self._frozen = []
                self.world.after(seconds, self._thaw)
            case "jump" if not any(each.is_given_up for each in self.agents):
                self.tell("launcher", f"has a clock that jumps by {seconds:.3f} s")
                self._ahead = min(self._ahead + seconds, MOST_AHEAD_SECONDS)
                self._set_timer()

    def _strike(self, kind: str, worker: Worker, seconds: float) -> None:
        match kind:
            case "kill":
                self.tell(worker.name, "is killed")
                self.end(worker, KILLED)
            case "stop":
                worker.stop(by_signal=True, for_good=True)
                worker.ended = True
                self.tell(worker.name, "is stopped")
            case "pause" if not worker.stopped:
                worker.stop(by_signal=True)
                self.tell(worker.name, f"is stopped for {seconds:.3f} s")
                self.world.after(seconds, worker.go_on)
            case "hang" if not worker.stopped:
                worker.stop(by_signal=False)
                self.tell(worker.name, f"hangs for {seconds:.3f} s")
                self.world.after(seconds, worker.go_on)
            case "late" if worker.epoch > worker.left and len(worker.members) > 1:
                place = worker.members.index(worker.number) + 1
                late = worker.members[place % len(worker.members)]
                self.tell(worker.name, f"says that worker {late} is late")
                worker.say("late", worker.epoch, [late])
            case "raise" if not worker.ended:
                worker.ended = True
                self.tell(worker.name, "raises ValueError")
                worker.home.say("raised", worker.number, "own ValueError")
                self.world.after(0.3, lambda: self.exit(worker, 1))
            case "close" if not worker.ended:  # Without a driver it ends.
                worker.ended = True
                self.tell(worker.name, "loses its connection")
                worker.home.soon(1e-4, lambda: worker.home.server.lose(worker))
                seconds = 1.5 * self.world.lot.random()
                self.world.after(seconds, lambda: self.exit(worker, 1))
            case "return" if worker.epoch > worker.left and not worker.ended | worker.stopped:
                self._early.add(worker.number)
                worker.leave_job()

    def _strike_agent(self, kind: str, agent: AgentProcess) -> None:
        if kind == "leaving":
            agent.signals.append(signal.SIGTERM)
            agent.turn()
        else:
            self.tell(f"host {agent.host}", "has an agent that is killed")
            agent.be_killed()

    def _heal(self) -> None:
        self.network.down.clear()
        first = dict(self.program.hosts)
        more = {name: max(slots, first.get(name, 0)) for name, slots in self._shown.items()}
        self._show(first | more)

    def _show(self, hosts: dict[str, int]) -> None:
        self._shown = hosts
        self.tell("hosts", " ".join(f"{name}:{slots}" for name, slots in hosts.items()))
        self.wake(lambda: self.driver.discovered(hosts, self.clock()))

    def _lose_host(self, host: str) -> None:
        self.network.down.add(host)
        self.tell(f"host {host}", "is lost")
        for agent in self._agents_of(host):
            agent.lose_host()

    def _agents_of(self, host: str) -> list[AgentProcess]:
        return [each for each in self.agents if each.lives and each.host == host]

    # -- processes

    def exit(self, worker: Worker, code: int) -> None:
        """Let a worker end by itself."""
        if worker.lives:
            self.end(worker, code)

    def end(self, worker: Worker, code: int) -> None:
        """Let a process end with an exit code, or by minus a signal."""
        self.collectives.end(worker, 1e-3)
        worker.home.soon(1e-4, lambda: worker.home.server.lose(worker))
        worker.home.soon(1e-3, lambda: setattr(worker, "code", code))

    # -- invariants

    def check_world(self, world: list[Any]) -> None:
        epoch, numbers, root, _, commit = world
        members = [[number, self.workers[number].host] for number in numbers]
        self.tell("driver", f"world {epoch} of {members}, commit {commit} of rank {root}")
        held = self._held()
        if commit < held:
            holders = [each.name for each in self._holders() if each.commit == held]
            text = f"world {epoch} begins with commit {commit}, and {holders} hold {held}"
            raise BrokenError(STEPS, text)

    def _holders(self) -> list[Worker]:
        return [each for each in self.workers.values() if each.lives and not each.ended]

    def _held(self) -> int:
        return max((each.commit for each in self._holders()), default=0)

    def _check_end(self, finish: Finish) -> None:
        self.tell("driver", f"ends with {finish.code}: {finish.sentence}")
        if finish.code == 0:
            right = sum(range(self.program.steps + 1))
            for number in finish.results:
                if self.workers[number].total != right and number not in self._early:
                    text = f"worker {number} has {self.workers[number].total}, not {right}"
                    raise BrokenError(STEPS, text)
            if not finish.results:
                raise BrokenError(ENDS, "the job succeeds without a result")
        elif self.program.is_graceful:
            raise BrokenError(ENDS, f"nobody died, and the job fails: {finish.sentence}")
        elif self._held():
            names = [each.name for each in self._holders() if each.commit]
            raise BrokenError(ENDS, f"{names} hold commits, and the job fails: {finish.sentence}")

    def _check_left(self) -> None:
        """Let the launcher end its agents, and check that they leave nothing."""
        self.launcher.let_end()
        until = self.world.now + LEFT_SECONDS
        self.world.run(lambda: self.world.now > until or not any(a.lives for a in self.agents))
        left = [f"the agent of {each.host}" for each in self.agents if each.lives]
        left += [each.name for each in self.workers.values() if each.lives]
        if left:
            raise BrokenError(ENDS, f"{', '.join(left)} run on after the end of the job")
        self.launcher.close()
        for leader in self.leaders:
            if not leader.closed or leader.way.ends[FROM_LAUNCHER].open:
                text = f"the launcher leaves its connection to {leader.way.host} open"
                raise BrokenError(LEFT, text)
        # Of whose folder nobody knew, or whose host cannot be reached. One that comes back after
        # the attempt to remove a folder keeps it.
        excused = {
            (each.host, each.agent.folder.path)
            for each in self.agents
            if not (each.way.is_known and self.network.reaches(each.host))
        }
        if left_behind := sorted(self.folders - self.unreached - excused):
            raise BrokenError(LEFT, f"folders of agents are left: {left_behind}")

    def _give_up(self) -> None:
        states = [
            f"{each.name} is in world {each.epoch} at step {each.state.step}, left {each.left}"
            for each in self.workers.values()
            if each.lives
        ]
        raise BrokenError(PROGRESS, "; ".join(states) or "no worker lives")


def play_elastic(program: ElasticProgram) -> ElasticJob:
    """Run a program; return its job, whose `broken` is the invariant that broke, or None."""
    job = ElasticJob(program)
    try:
        job.run()
    except BrokenError as broken:
        job.broken = broken
        job.tell("world", str(broken))
    return job
