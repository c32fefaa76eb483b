"""An elastic job in a world: the driver decides, and workers train, commit, sync, die and return.

The driver is the real one, with the worker's agreement on checks. Its hosts, agents and workers are
played: a worker speaks the protocol of membership/frames.py, and its training is a number to which
each step adds. A step is a collective of its world, so a loss ends it on all ranks.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdlite.common.membership.checks import Checks
from hvdlite.launcher.decisions import commands
from hvdlite.launcher.decisions.commands import ElasticPlan, Finish
from hvdlite.launcher.decisions.driver import Driver
from tests.simulation.world import BrokenError, World

STEPS, ORDER, SLOTS, PROGRESS, ENDS = (
    "no committed step is lost while a rank that held it lives",
    "all ranks agree on their worlds",
    "a slot has one process, and a job no more than it may have",
    "nobody waits for what can never come",
    "the job ends by the rules",
)
LIMIT_SECONDS = 2000.0  # Of virtual time: a job that has not ended by then never will.
SILENCE_SECONDS = 1.0  # After which an agent that says nothing is lost.
KILLED = 137


@dataclass(frozen=True)
class Happening:
    """Something that happens to a job: to the worker `which` of the living ones, or to a host."""

    at: float
    kind: str  # "kill", "stop", "raise"; "lose", "restore" a host; "show" hosts; "leaving"
    which: int = 0
    host: str = ""
    hosts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class ElasticProgram:
    """An elastic job: its hosts, its plan, and what happens to it."""

    seed: int
    hosts: tuple[tuple[str, int], ...]
    min_np: int = 1
    max_np: int | None = None
    admit: str = commands.READY
    failures_by_host: bool = False
    steps: int = 40
    step_seconds: float = 0.1
    commit_every: int = 2
    happenings: tuple[Happening, ...] = ()

    @property
    def is_graceful(self) -> bool:
        """Whether nobody dies: the job has to succeed."""
        return all(each.kind == "show" for each in self.happenings)


def make_elastic_program(seed: int) -> ElasticProgram:
    """Return the program of a seed."""
    lot = random.Random(seed)
    names = "abcd"[: lot.randint(1, 4)]
    hosts = tuple((name, lot.randint(1, 3)) for name in names)
    graceful = lot.random() < 0.3
    deaths = ("kill", "kill", "stop", "raise", "lose", "show", "leaving")
    kinds = ("show",) if graceful else deaths
    happenings = []
    at = lot.choice((0.0, 0.2, 2.0)) + 0.1 * lot.random()
    for _ in range(lot.randint(0, 5)):
        at += lot.choice((0.003, 0.003, 0.05, 1.0, 4.0)) * lot.random()
        kind = lot.choice(kinds)
        host = lot.choice("abcde")
        shown = tuple((name, lot.randint(1, 3)) for name in "abcde" if lot.random() < 0.5)
        if lot.random() < 0.5:  # One of them less.
            shown = tuple(each for each in hosts if each[0] != host)
        happenings.append(
            Happening(at, kind, lot.randrange(8), host, shown or hosts if kind == "show" else ())
        )
        if not graceful and lot.random() < 0.3:  # Two that come together.
            happenings.append(Happening(at + 3e-3 * lot.random(), "kill", lot.randrange(8)))
        if kind == "lose" and lot.random() < 0.7:
            happenings.append(Happening(at + 5 * lot.random(), "restore", host=host))
    steps, step_seconds = lot.choice(((200, 1e-3), (200, 1e-3), (40, 0.01), (20, 0.3)))
    return ElasticProgram(
        seed,
        hosts,
        min_np=lot.choice((1, 1, min(3, sum(slots for _, slots in hosts)))),
        max_np=lot.choice((None, None, 3, 4)),
        admit=lot.choice((commands.READY, commands.WAIT)),
        failures_by_host=lot.random() < 0.2,
        steps=steps,
        step_seconds=step_seconds,
        commit_every=lot.choice((1, 1, 3)),
        happenings=tuple(happenings),
    )


@dataclass
class Saved:
    """What a commit keeps."""

    step: int = 0
    total: int = 0


class Worker:
    """A process that trains."""

    def __init__(self, job: ElasticJob, start: commands.StartWorker) -> None:
        self.number, self.host, self.slot = start.number, start.host, start.slot
        self.name = f"worker {start.number}"
        self.lives = True
        self.stopped = False  # By a signal: it does nothing, and has not ended.
        self.ended = False  # It was told to end, or is done, or raises.
        self.commit = 0
        self.saved = Saved()
        self.step = self.total = 0
        self.epoch = 0
        self.members: tuple[int, ...] = ()
        self.world: list[Any] = []
        self.left = 0  # The last epoch that it has left.
        self._job = job
        self._checks = Checks()

    # -- what the driver says

    def hear(self, frame: list[Any]) -> None:
        if not self.lives or self.stopped:
            return
        match frame:
            case ["newcomer", *_]:
                self._soon(lambda: self.say("ready", 0, self.commit))
            case ["world", int(epoch), *_] if epoch > self.epoch:
                self._begin(frame)
            case ["bodies", int(epoch), 0, _] if epoch == self.epoch > self.left:
                self._soon(lambda: self._sync(epoch))
            case ["regroup", int(epoch), *_] if epoch == self.epoch:
                self.lose(epoch)
            case ["notice", int(counter), int()]:
                self._checks.hold(counter)
                self.say("checks", counter, self._checks.passed)
            case ["raise", int(counter), int(check), int(kind)]:
                self._checks.decide(counter, check, kind)
                self._job.look(self)
            case ["end", int(code), _]:
                self.ended = True
                self._soon(lambda: self._job.exit(self, code))

    def say(self, *frame: Any) -> None:
        if self.lives and not self.stopped:
            self._job.to_driver(self, list(frame))

    # -- a world

    def _begin(self, frame: list[Any]) -> None:
        _, self.epoch, members, *_ = frame
        self.world = frame
        self.members = tuple(number for number, _ in members)
        self._checks = Checks()
        if self.number not in self.members:
            raise BrokenError(ORDER, f"{self.name} is told a world of {self.members}")
        self.say("gather", self.epoch, 0, b"")

    def _sync(self, epoch: int) -> None:
        if epoch != self.epoch or self.left >= epoch:
            return
        _, _, _, root, behind, commit = self.world
        if not behind:
            self._train(epoch)
            return

        def synced() -> None:
            if self.members.index(self.number) in behind:
                source = self._job.workers[self.members[root]]
                self.saved, self.commit = source.saved, commit
                self._restore()
            self._train(epoch)

        self._job.meet(self, "sync", synced)

    def _restore(self) -> None:
        self.step, self.total = self.saved.step, self.saved.total

    def _train(self, epoch: int) -> None:
        if self.ended or epoch != self.epoch or self.left >= epoch:
            return
        if self.step == self._job.program.steps:
            self.ended = True
            self._job.tell(self.name, f"is done, with {self.total}")
            self.say("bye")
            self._job.depart(self)
            self._soon(lambda: self._job.exit(self, 0))
            return
        pause = self._job.program.step_seconds * self._job.world.lot.random()
        self._soon(lambda: self._reduce(epoch), pause)

    def _reduce(self, epoch: int) -> None:
        if not self.ended and epoch == self.epoch > self.left:
            self._job.meet(self, f"step {self.step + 1}", lambda: self._stepped(epoch))

    def _stepped(self, epoch: int) -> None:
        self.step += 1
        self.total += self.step
        if self.step % self._job.program.commit_every:
            self._soon(lambda: self._train(epoch))
            return
        self._soon(lambda: self._commit(epoch))

    def _commit(self, epoch: int) -> None:
        if self.ended or epoch != self.epoch or self.left >= epoch:
            return
        self.saved, self.commit = Saved(self.step, self.total), self.commit + 1
        self._job.tell(self.name, f"holds commit {self.commit}, of step {self.step}")
        self._check(epoch)

    def _check(self, epoch: int) -> None:
        if self.ended or epoch != self.epoch or self.left >= epoch:
            return
        if self._checks.held:
            self._job.wait(self, lambda: not self._checks.held, lambda: self._check(epoch))
        elif self._checks.enter() is None:
            self._train(epoch)
        else:
            self._job.depart(self)
            self._leave(epoch)

    def lose(self, epoch: int) -> None:
        """See that the world is over: go back to the last commit."""
        if self.lives and not self.ended and epoch == self.epoch > self.left:
            self._restore()
            self._job.note_left(self, epoch)
            self._leave(epoch)

    def _leave(self, epoch: int) -> None:
        self.left = epoch
        self._soon(lambda: self.say("ready", epoch, self.commit))

    def _soon(self, action: Callable[[], None], pause: float = 0.0) -> None:
        def act() -> None:
            if self.lives and not self.stopped:
                action()

        self._job.world.after(pause + self._job.world.soon(), act)


class ElasticJob:
    """The driver with its hosts and workers."""

    def __init__(self, program: ElasticProgram) -> None:
        self.program = program
        self.world = World(program.seed)
        self.broken: BrokenError | None = None
        self.finish: Finish | None = None
        self.workers: dict[int, Worker] = {}
        plan = ElasticPlan(
            num_proc=program.min_np,
            min_np=program.min_np,
            max_np=program.max_np,
            cooldown=(1, 4),
            elastic_timeout=60.0,
            admit=program.admit,
            failures_by_host=program.failures_by_host,
        )
        self.driver = Driver(plan, self.world.lot.random)
        self._agents: set[str] = set()
        self._down: set[str] = set()
        self._shown: dict[str, int] = {}
        self._busy: dict[object, float] = defaultdict(float)
        self._ticks = 0
        self._worlds: dict[int, list[Any]] = {}
        self._known_dead: set[int] = set()
        self._meetings: dict[tuple[int, str], dict[int, Callable[[], None]]] = {}
        self._departed: dict[int, set[int]] = defaultdict(set)
        self._waits: dict[int, tuple[Callable[[], bool], Callable[[], None]]] = {}

    def tell(self, who: str, what: str) -> None:
        self.world.tell(who, what)

    def run(self) -> None:
        """Run the job. Raises `BrokenError`."""
        self._event("tick")
        self._show(dict(self.program.hosts))
        for happening in self.program.happenings:
            self.world.after(happening.at, lambda each=happening: self._happen(each))  # type: ignore[misc]
        # In the end all hosts of the beginning are there again.
        last = max((each.at for each in self.program.happenings), default=0.0) + 10.0
        self.world.after(last, self._heal)
        self.world.after(LIMIT_SECONDS, self._give_up)
        self.world.run(lambda: self.finish is not None)
        assert self.finish is not None
        self._check_end(self.finish)

    # -- what happens

    def _happen(self, happening: Happening) -> None:
        living = [each for each in self.workers.values() if each.lives]
        match happening.kind:
            case "kill" if living:
                worker = living[happening.which % len(living)]
                self.tell(worker.name, "is killed")
                self._die(worker, KILLED, "killed by signal 9", by_signal=True)
            case "stop" if living:
                worker = living[happening.which % len(living)]
                worker.stopped = worker.ended = True
                self.tell(worker.name, "is stopped")
                self._carry("agent", worker.host, 0.1, "worker_stopped", worker.number)
            case "raise" if living:
                worker = living[happening.which % len(living)]
                if not worker.ended:
                    worker.ended = True
                    self.tell(worker.name, "raises ValueError")
                    self._carry(
                        "agent", worker.host, 1e-3, "worker_raised", worker.number, "ValueError"
                    )
                    self.world.after(0.3, lambda: self.exit(worker, 1, "ValueError"))
            case "lose" if happening.host not in self._down:
                self._lose_host(happening.host)
            case "restore":
                self._down.discard(happening.host)
            case "show":
                self._show(dict(happening.hosts))
            case "leaving" if happening.host in self._agents:
                self._event("agent_leaving", happening.host, "it is reclaimed")

    def _heal(self) -> None:
        self._down.clear()
        first = dict(self.program.hosts)
        more = {name: max(slots, first.get(name, 0)) for name, slots in self._shown.items()}
        self._show(first | more)

    def _show(self, hosts: dict[str, int]) -> None:
        self._shown = hosts
        self.tell("hosts", " ".join(f"{name}:{slots}" for name, slots in hosts.items()))
        self._event("discovered", hosts)

    def _lose_host(self, host: str) -> None:
        self._down.add(host)
        self.tell(f"host {host}", "is lost")
        if host in self._agents:
            self._agents.discard(host)
            for worker in self.workers.values():
                if worker.host == host and worker.lives:
                    self._end(worker, SILENCE_SECONDS)
            self.world.after(SILENCE_SECONDS, lambda: self._say_lost(host))

    def _say_lost(self, host: str) -> None:
        if host not in self._agents:
            self._event("agent_lost", host, "no sign of life for 1 s", True)

    # -- processes

    def exit(self, worker: Worker, code: int, cause: str | None = None) -> None:
        """Let a worker end by itself."""
        if worker.lives:
            self._die(worker, code, cause, by_signal=False)

    def _die(self, worker: Worker, code: int, cause: str | None, *, by_signal: bool) -> None:
        self._end(worker, 1e-3)
        number = worker.number
        self._carry(worker, "", 1e-4, "worker_closed", number)
        self._carry("agent", worker.host, 1e-3, "worker_ended", number, code, cause, by_signal)

    def _end(self, worker: Worker, seen_after: float) -> None:
        """End a process: the other ranks of its world see it."""
        worker.lives = False
        self._waits.pop(worker.number, None)
        if worker.number not in self._departed[worker.epoch]:
            self.note_left(worker, worker.epoch, seen_after)

    def note_left(self, worker: Worker, epoch: int, seen_after: float = 1e-3) -> None:
        """Let the others of a world see that a member has left it."""
        if not epoch:
            return
        self._waits.pop(worker.number, None)
        for number in worker.members:
            peer = self.workers[number]
            if number != worker.number and peer.epoch == epoch:
                delay = seen_after * (0.5 + self.world.lot.random())
                self.world.after(delay, lambda each=peer: each.lose(epoch))  # type: ignore[misc]

    def depart(self, worker: Worker) -> None:
        """Let a worker leave its world in order: only those fail that need it."""
        epoch = worker.epoch
        self._departed[epoch].add(worker.number)
        for (of, _), meeting in self._meetings.items():
            if of == epoch:
                for number in meeting:
                    self._fail(self.workers[number], epoch)

    def _fail(self, worker: Worker, epoch: int) -> None:
        self.world.after(1e-3 * (0.5 + self.world.lot.random()), lambda: worker.lose(epoch))

    # -- collectives and waits

    def meet(self, worker: Worker, what: str, then: Callable[[], None]) -> None:
        """Let a worker take part in a collective of its world, and go on when all have come."""
        meeting = self._meetings.setdefault((worker.epoch, what), {})
        meeting[worker.number] = then
        members = [self.workers[number] for number in worker.members]
        if self._departed[worker.epoch]:
            self._fail(worker, worker.epoch)
        if not all(each.number in meeting for each in members):
            return
        del self._meetings[worker.epoch, what]
        epoch = worker.epoch
        for each in members:
            self.world.after(self.world.soon(), lambda e=each: self._met(e, epoch, meeting))  # type: ignore[misc]

    def _met(self, worker: Worker, epoch: int, meeting: dict[int, Callable[[], None]]) -> None:
        if worker.lives and not worker.ended and worker.epoch == epoch > worker.left:
            meeting[worker.number]()

    def wait(self, worker: Worker, ready: Callable[[], bool], then: Callable[[], None]) -> None:
        self._waits[worker.number] = ready, then

    def look(self, worker: Worker) -> None:
        """Let a worker go on if what it waits for has come."""
        ready, then = self._waits.get(worker.number, (lambda: False, lambda: None))
        if ready():
            del self._waits[worker.number]
            then()

    # -- the driver

    def to_driver(self, worker: Worker, frame: list[Any]) -> None:
        self._carry(worker, "", 1e-4, "worker_said", worker.number, frame)

    def _carry(self, source: object, of: str, latency: float, event: str, *arguments: Any) -> None:
        """Let the driver hear of an event, in the order of those that come the same way."""
        key = (source, of) if isinstance(source, str) else source
        at = self.world.now + latency * (0.5 + self.world.lot.random())
        at = self._busy[key] = max(at, self._busy[key])
        self.world.after(at - self.world.now, lambda: self._event(event, *arguments))

    def _event(self, name: str, *arguments: Any) -> None:
        if self.finish is None:
            if name == "worker_ended":
                self._known_dead.add(arguments[0])
            getattr(self.driver, name)(*arguments, now=self.world.clock())
            while orders := self.driver.take():
                for order in orders:
                    self._obey(order)
            self._set_timer()

    def _set_timer(self) -> None:
        due = self.driver.due()
        self._ticks += 1
        if due is not None:
            ticks = self._ticks
            delay = max(0.0, due - self.world.now) + 1e-6
            self.world.after(delay, lambda: self._tick(ticks))

    def _tick(self, ticks: int) -> None:
        if ticks == self._ticks:
            self._event("tick")

    def _obey(self, command: commands.Command) -> None:
        match command:
            case commands.StartAgent(host):
                self.world.after(0.2 * self.world.lot.random(), lambda: self._start_agent(host))
            case commands.DropAgent(host):
                self._agents.discard(host)
                for worker in self.workers.values():
                    if worker.host == host and worker.lives:
                        self._end(worker, 1e-3)
            case commands.StartWorker():
                self._start_worker(command)
            case commands.EndWorker(number, kill):
                self.workers[number].ended = True
                delay = 1e-3 if kill else 0.1
                self.world.after(delay, lambda: self._signal(number))
            case commands.Tell(numbers, frame):
                self._send(numbers, frame)
            case commands.Say(line):
                self.tell("driver", line)
            case Finish():
                self.finish = command

    def _start_agent(self, host: str) -> None:
        if host not in self._down:
            self._agents.add(host)
            self._event("agent_came", host)
        else:
            self._event("agent_lost", host, "ssh cannot reach it", True)

    def _start_worker(self, start: commands.StartWorker) -> None:
        here = [each for each in self.workers.values() if each.host == start.host and each.lives]
        others = [each.name for each in here if each.slot == start.slot]
        if others:
            raise BrokenError(SLOTS, f"slot {start.slot} of {start.host} still has {others}")
        worker = self.workers[start.number] = Worker(self, start)
        if start.host not in self._agents:
            worker.lives = False  # Its host was lost, which the driver has yet to hear.
            return
        self.world.after(self.world.lot.choice((0.05, 2.0)), lambda: worker.say("hello", 1))

    def _signal(self, number: int) -> None:
        worker = self.workers[number]
        if worker.lives:
            self._die(worker, KILLED, "killed by signal 9", by_signal=True)

    def _send(self, numbers: tuple[int, ...], frame: list[Any]) -> None:
        if frame[0] == "world":
            self._check_world(frame)
        for number in numbers:
            if frame[0] == "end":  # It is not counted on from now on.
                self.workers[number].ended = True
            at = self.world.now + 1e-4 * (0.5 + self.world.lot.random())
            at = self._busy["to", number] = max(at, self._busy["to", number])
            self.world.after(at - self.world.now, lambda n=number: self.workers[n].hear(frame))  # type: ignore[misc]

    # -- invariants

    def _check_world(self, frame: list[Any]) -> None:
        _, epoch, members, root, _, commit = frame
        if epoch in self._worlds:
            raise BrokenError(ORDER, f"two worlds {epoch}: {self._worlds[epoch]} and {members}")
        self._worlds[epoch] = members
        self._check_order(epoch, [number for number, _ in members])
        self.tell("driver", f"world {epoch} of {members}, commit {commit} of rank {root}")
        held = self._held()
        if commit < held:
            holders = [each.name for each in self._holders() if each.commit == held]
            text = f"world {epoch} begins with commit {commit}, and {holders} hold {held}"
            raise BrokenError(STEPS, text)

    def _check_order(self, epoch: int, numbers: list[int]) -> None:
        most = self.program.max_np
        if most is not None and len(numbers) > max(2, most):  # Two where one hands over.
            raise BrokenError(SLOTS, f"world {epoch} has {numbers}, and {most} are allowed")
        dead = [number for number in numbers if number in self._known_dead]
        if dead:
            raise BrokenError(ORDER, f"world {epoch} has {dead}, whose ends the driver knows")
        if epoch == 1:
            return
        before = [number for number, _ in self._worlds[epoch - 1]]
        kept = [number for number in numbers if number in before]
        if kept != [number for number in before if number in numbers]:
            raise BrokenError(ORDER, f"ranks swap their order: {numbers} after {before}")
        if numbers[0] not in before:
            raise BrokenError(ORDER, f"rank 0 of {numbers} is new, after {before}")

    def _holders(self) -> list[Worker]:
        return [each for each in self.workers.values() if each.lives and not each.ended]

    def _held(self) -> int:
        return max((each.commit for each in self._holders()), default=0)

    def _check_end(self, finish: Finish) -> None:
        self.tell("driver", f"ends with {finish.code}: {finish.sentence}")
        if finish.code == 0:
            right = sum(range(self.program.steps + 1))
            for number in finish.results:
                if self.workers[number].total != right:
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
