"""An elastic job in a world: the driver decides, and workers train, commit, sync, die and return.

The driver is the real one, with the worker's agreement on checks. Its hosts, agents and workers are
played: a worker's training is a number to which each step adds. A step is a collective of its
world, so a loss ends it on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from hvdlite.launcher.decisions import commands
from hvdlite.launcher.decisions.commands import ElasticPlan, Finish
from tests.simulation.elastic.collectives import Collectives
from tests.simulation.elastic.launcher import ORDER, SLOTS, Launcher
from tests.simulation.elastic.programs import (
    FROM_LAUNCHER,
    SILENCE_SECONDS,
    TO_LAUNCHER,
    ElasticProgram,
    Happening,
)
from tests.simulation.elastic.workers import Worker
from tests.simulation.world import BrokenError, World

STEPS, PROGRESS, ENDS = (
    "no committed step is lost while a rank that held it lives",
    "nobody waits for what can never come",
    "the job ends by the rules",
)
LAWS = (STEPS, ORDER, SLOTS, PROGRESS, ENDS)
LIMIT_SECONDS = 2000.0  # Of virtual time: a job that has not ended by then never will.
KILLED = 137


class ElasticJob(Launcher):
    """The driver with its hosts and workers."""

    def __init__(self, program: ElasticProgram) -> None:
        self.program = program
        self.world = World(program.seed)
        self.broken: BrokenError | None = None
        self.workers: dict[int, Worker] = {}
        self.collectives = Collectives(self.world, self.workers)
        plan = ElasticPlan(
            num_proc=program.min_np,
            min_np=program.min_np,
            max_np=program.max_np,
            cooldown=(1, 4),
            elastic_timeout=60.0,
            admit=program.admit,
            failures_by_host=program.failures_by_host,
        )
        super().__init__(plan, self.world.lot.random)
        self._down: set[str] = set()
        self._shown: dict[str, int] = {}
        self._busy: dict[object, float] = defaultdict(float)
        self._stalls: dict[tuple[str, int], float] = defaultdict(float)  # Host, way -> until then.
        self._starts: dict[str, int] = defaultdict(int)  # Of agents, by host.
        self._early: set[int] = set()  # Workers that have returned before the last step.
        self._frozen: list[tuple[str, tuple[Any, ...]]] | None = None  # What the launcher has yet
        self._ahead = 0.0  # to hear; by how much its clock is ahead.
        self._ticks = 0

    def run(self) -> None:
        """Run the job. Raises `BrokenError`."""
        self.event("tick")
        self._show(dict(self.program.hosts))
        for happening in self.program.happenings:
            self.world.after(happening.at, lambda each=happening: self._happen(each))  # type: ignore[misc]
        # In the end all hosts of the beginning are there again.
        last = max((each.at + each.seconds for each in self.program.happenings), default=0.0)
        self.world.after(last + 10.0, self._heal)
        self.world.after(LIMIT_SECONDS, self._give_up)
        self.world.run(lambda: self.finish is not None)
        assert self.finish is not None
        self._check_end(self.finish)

    @property
    def processes(self) -> Mapping[int, Worker]:
        return self.workers

    def tell(self, who: str, what: str) -> None:
        """Add to the story."""
        self.world.tell(who, what)

    # -- what happens

    def _happen(self, happening: Happening) -> None:
        living = [each for each in self.workers.values() if each.lives]
        kind, host, seconds = happening.kind, happening.host, happening.seconds
        if kind in ("kill", "stop", "raise", "pause", "close", "return"):
            if living:
                self._strike(kind, living[happening.which % len(living)], seconds)
            return
        match kind:
            case "lose" if host not in self._down:
                self._lose_host(host)
            case "restore":
                self._down.discard(host)
            case "show":
                self._show(dict(happening.hosts))
            case "leaving" if host in self.agents:
                self.event("agent_leaving", host, "it is reclaimed")
            case "stall":
                self._stall(host, happening.way, seconds)
            case "part":
                self.tell(f"host {host}", f"does not reach {happening.other} for {seconds:.3f} s")
                self.collectives.part(host, happening.other, seconds)
            case "freeze" if self._frozen is None:
                self.tell("launcher", f"is stopped for {seconds:.3f} s")
                self._frozen = []
                self.world.after(seconds, self._thaw)
            case "jump":
                self.tell("launcher", f"has a clock that jumps by {seconds:.3f} s")
                self._ahead += seconds
                self._set_timer()

    def _strike(self, kind: str, worker: Worker, seconds: float) -> None:
        match kind:
            case "kill":
                self.tell(worker.name, "is killed")
                self._die(worker, KILLED, "killed by signal 9", by_signal=True)
            case "stop":
                worker.stopped = worker.ended = True
                self.tell(worker.name, "is stopped")
                self._carry("agent", worker, 0.1, "worker_stopped", worker.number)
            case "pause" if not worker.stopped:
                worker.stopped = True
                self.tell(worker.name, f"is stopped for {seconds:.3f} s")
                self.world.after(0.1 * self.world.lot.random(), lambda: self._see_stop(worker))
                self.world.after(seconds, worker.go_on)
            case "raise" if not worker.ended:
                worker.ended = True
                self.tell(worker.name, "raises ValueError")
                number = worker.number
                self._carry("agent", worker, 1e-3, "worker_raised", number, "ValueError")
                self.world.after(0.3, lambda: self.exit(worker, 1, "ValueError"))
            case "close" if not worker.ended:  # Without a driver it ends.
                worker.ended = True
                self.tell(worker.name, "loses its connection")
                self._carry(worker, worker, 1e-4, "worker_closed", worker.number)
                seconds = 1.5 * self.world.lot.random()
                self.world.after(seconds, lambda: self.exit(worker, 1, "SystemExit"))
            case "return" if worker.epoch > worker.left and not worker.ended | worker.stopped:
                self._early.add(worker.number)
                worker.leave_job()

    def _see_stop(self, worker: Worker) -> None:
        if worker.lives and worker.stopped:
            worker.ended = True
            self._carry("agent", worker, 1e-3, "worker_stopped", worker.number)

    def _heal(self) -> None:
        self._down.clear()
        first = dict(self.program.hosts)
        more = {name: max(slots, first.get(name, 0)) for name, slots in self._shown.items()}
        self._show(first | more)

    def _show(self, hosts: dict[str, int]) -> None:
        self._shown = hosts
        self.tell("hosts", " ".join(f"{name}:{slots}" for name, slots in hosts.items()))
        self.event("discovered", hosts)

    def _lose_host(self, host: str) -> None:
        self._down.add(host)
        self.tell(f"host {host}", "is lost")
        if host in self.agents:
            self.agents.discard(host)
            for worker in self._living_on(host):
                self.collectives.end(worker, SILENCE_SECONDS)
            self.world.after(SILENCE_SECONDS, lambda: self._say_lost(host))

    def _say_lost(self, host: str) -> None:
        if host not in self.agents:
            self.event("agent_lost", host, "no sign of life for 1 s", True)

    def _living_on(self, host: str) -> list[Worker]:
        return [each for each in self.workers.values() if each.host == host and each.lives]

    # -- the connection between the launcher and the agent of a host

    def _stall(self, host: str, way: int, seconds: float) -> None:
        """Let nothing arrive for a while; where it takes too long, both ends give up."""
        ways = {TO_LAUNCHER: "to", FROM_LAUNCHER: "from"}.get(way, "to and from")
        self.tell(f"host {host}", f"sends nothing {ways} the launcher for {seconds:.3f} s")
        for each in (TO_LAUNCHER, FROM_LAUNCHER):
            if way & each:
                self._stalls[host, each] = max(self._stalls[host, each], self.world.now + seconds)
        if host in self.agents and seconds > SILENCE_SECONDS:
            start = self._starts[host]
            self.world.after(SILENCE_SECONDS, lambda: self._cut_off(host, start))

    def _cut_off(self, host: str, start: int) -> None:
        if host not in self.agents or self._starts[host] != start:
            return
        self.agents.discard(host)
        self.tell(f"host {host}", "is cut off from the launcher")
        workers = self._living_on(host)
        for worker in workers:
            worker.ended = worker.cut_off = True
        # The agent ends them where it sees that, too.
        seconds = 0.2 * self.world.lot.random() + self.world.lot.choice((0.0, 0.0, 1.0))
        self.world.after(seconds, lambda: self._end_all(workers))
        self.event("agent_lost", host, "no sign of life for 1 s", True)

    def _end_all(self, workers: list[Worker]) -> None:
        for worker in workers:
            if worker.lives:
                self.collectives.end(worker, 1e-3)

    def _arrival(self, seconds: float, key: object, host: str, way: int) -> float:
        """Return in how many seconds something arrives, after all that was sent the same way."""
        at = self.world.now + seconds * (0.5 + self.world.lot.random())
        at = self._busy[key] = max(at, self._busy[key], self._stalls[host, way])
        return at - self.world.now

    # -- processes

    def exit(self, worker: Worker, code: int, cause: str | None = None) -> None:
        """Let a worker end by itself."""
        if worker.lives:
            self._die(worker, code, cause, by_signal=False)

    def _die(self, worker: Worker, code: int, cause: str | None, *, by_signal: bool) -> None:
        self.collectives.end(worker, 1e-3)
        number = worker.number
        self._carry(worker, worker, 1e-4, "worker_closed", number)
        self._carry("agent", worker, 1e-3, "worker_ended", number, code, cause, by_signal)

    def _signal(self, number: int) -> None:
        worker = self.workers[number]
        if worker.lives:
            self._die(worker, KILLED, "killed by signal 9", by_signal=True)

    # -- the driver

    def to_driver(self, worker: Worker, frame: list[Any]) -> None:
        """Let the driver hear what a worker says."""
        self._carry(worker, worker, 1e-4, "worker_said", worker.number, frame)

    def _carry(
        self, source: object, worker: Worker, latency: float, event: str, *arguments: Any
    ) -> None:
        """Let the driver hear of an event, in the order of those that come the same way."""
        key = (source, worker.host) if isinstance(source, str) else source

        def arrive() -> None:
            if not worker.cut_off:
                self.event(event, *arguments)

        self.world.after(self._arrival(latency, key, worker.host, TO_LAUNCHER), arrive)

    def event(self, name: str, *arguments: Any) -> None:
        """Let the driver hear of an event, when the launcher runs."""
        if self.finish is not None:
            return
        if self._frozen is not None:
            self._frozen.append((name, arguments))
            return
        self.happen(name, *arguments, now=self.world.clock() + self._ahead)
        self._set_timer()

    def _thaw(self) -> None:
        events, self._frozen = self._frozen or [], None
        for name, arguments in events:
            self.event(name, *arguments)

    def _set_timer(self) -> None:
        due = self.driver.due()
        self._ticks += 1
        if due is not None:
            ticks = self._ticks
            delay = max(0.0, due - self._ahead - self.world.now) + 1e-6
            self.world.after(delay, lambda: self._tick(ticks))

    def _tick(self, ticks: int) -> None:
        if ticks == self._ticks:
            self.event("tick")

    def begin_agent(self, host: str) -> None:
        self.world.after(0.2 * self.world.lot.random(), lambda: self._start_agent(host))

    def _start_agent(self, host: str) -> None:
        stalled = max(self._stalls[host, TO_LAUNCHER], self._stalls[host, FROM_LAUNCHER])
        if host in self._down or stalled > self.world.now:
            self.event("agent_lost", host, "ssh cannot reach it", True)
        else:
            self.agents.add(host)
            self._starts[host] += 1
            self.event("agent_came", host)

    def end_agent(self, host: str) -> None:
        for worker in self._living_on(host):
            self.collectives.end(worker, 1e-3)

    def begin_worker(self, start: commands.StartWorker) -> None:
        worker = self.workers[start.number] = Worker(self, start)
        if start.host not in self.agents:
            worker.lives = False  # Its host was lost, which the driver has yet to hear.
            return
        self.world.after(self.world.lot.choice((0.05, 2.0)), lambda: worker.say("hello", 1))

    def end_worker(self, number: int, *, kill: bool) -> None:
        worker = self.workers[number]
        worker.ended = True
        stall = self._stalls[worker.host, FROM_LAUNCHER] - self.world.now
        self.world.after(max(1e-3 if kill else 0.1, stall), lambda: self._signal(number))

    def send(self, numbers: tuple[int, ...], frame: list[Any]) -> None:
        for number in numbers:
            worker = self.workers[number]
            if frame[0] == "end":  # It is not counted on from now on.
                worker.ended = True
            after = self._arrival(1e-4, ("to", number), worker.host, FROM_LAUNCHER)
            self.world.after(after, lambda each=worker: each.hear(frame))  # type: ignore[misc]

    def say(self, line: str) -> None:
        self.tell("driver", line)

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

    def _give_up(self) -> None:
        states = [
            f"{each.name} is in world {each.epoch} at step {each.step}, left {each.left}"
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
