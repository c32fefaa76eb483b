"""An elastic job whose workers a test plays: they do at once what it says, and nothing else."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hvdlite.launcher.decisions.commands import ElasticPlan, StartWorker
from tests.simulation.elastic.laws import Watched, seeded


@dataclass
class Puppet:
    """A worker."""

    number: int
    host: str
    slot: int
    start: StartWorker
    lives: bool = True
    frames: list[list[Any]] = field(default_factory=list)
    epoch: int = 0
    commit: int = 0
    checks: int = 0
    in_world: bool = False
    cause: str = ""  # The exception that ends it.
    ended: list[bool] = field(default_factory=list)  # One `kill` for each order to end.

    def last(self, kind: str) -> list[Any] | None:
        return next((frame for frame in reversed(self.frames) if frame[0] == kind), None)


_NO_LOOP: Any = SimpleNamespace(look_every=lambda seconds, look: None)


class JobByHand(Watched):
    """Agents come at once and workers say hello at once, unless they are told not to."""

    def __init__(self, hosts: dict[str, int] | None = None, **plan: Any) -> None:
        plan.setdefault("min_np", plan.setdefault("num_proc", sum((hosts or {}).values()) or 1))
        uniform: Callable[[], float] = plan.pop("uniform", lambda: 0.0)
        with seeded(uniform):
            super().__init__(ElasticPlan(**plan), _NO_LOOP)
        self.now = 100.0
        self.agents: set[str] = set()
        self.processes: dict[int, Puppet] = {}
        self.watch(self.processes)
        self.lines: list[str] = []
        self.slow_hosts: set[str] = set()  # Their agents come when `agent` says so.
        self.slow_workers = False  # Newcomers say hello when `hello` says so.
        self.busy: set[int] = set()  # They do not answer a regroup.
        self.event("tick")
        if hosts is not None:
            self.discover(hosts)

    # -- events

    def event(self, name: str, *arguments: Any, **options: Any) -> None:
        getattr(self.driver, name)(*arguments, now=self.now, **options)
        self.carry_out()

    def discover(self, hosts: dict[str, int]) -> None:
        self.event("discovered", hosts)

    def agent(self, host: str) -> None:
        self.agents.add(host)
        self.event("agent_came", host)

    def hello(self, number: int) -> None:
        self.event("worker_said", number, ["hello", 1000 + number])

    def ready(self, number: int, commit: int | None = None) -> None:
        process = self.processes[number]
        process.commit = process.commit if commit is None else commit
        process.in_world = False
        self.event("worker_said", number, ["ready", process.epoch, process.commit])

    def end(self, number: int, code: int, cause: str | None = None) -> None:
        process = self.processes[number]
        assert process.lives
        process.lives = process.in_world = False
        self.event("worker_ended", number, code, cause, code > 128)

    def begin_to_raise(self, number: int, cause: str = "ValueError") -> None:
        """Let a worker raise; its process has not ended."""
        process = self.processes[number]
        process.in_world, process.cause = False, cause
        self.event("worker_raised", number, cause)

    def end_by_exception(self, number: int) -> None:
        """Let the process end that has raised."""
        self.end(number, 1, self.processes[number].cause)

    def kill(self, number: int) -> None:
        self.end(number, 137, "killed by signal 9")

    def lose_host(self, host: str, why: str = "no sign of life for 1 s", back: bool = True) -> None:
        self.drop_agent(host)
        self.event("agent_lost", host, why, back)

    def commit(self, number: int) -> None:
        """All ranks commit."""
        for member in self.members:
            self.processes[member].commit = number

    def pass_checks(self) -> None:
        """Let all ranks pass checks until the one in which they are interrupted."""
        for number in self.members:
            process = self.processes[number]
            frame = process.last("raise")
            if process.lives and process.in_world and frame is not None:
                self.ready(number)

    def newcomers_ready(self) -> None:
        for process in list(self.processes.values()):
            if process.lives and process.epoch == 0 and process.last("newcomer"):
                self.ready(process.number)

    def wait(self, seconds: float) -> None:
        """Let time pass, with a tick whenever the driver wants one."""
        end = self.now + seconds
        while self.finish is None:
            due = self.driver.due()
            if due is None or due > end:
                break
            assert due > self.now, "the driver wants a tick in the past"
            self.now = due
            self.event("tick")
        self.now = end
        self.event("tick")

    # -- commands

    def start_agent(self, host: str) -> None:
        assert host not in self.agents
        if host not in self.slow_hosts:
            self.agents.add(host)
            self.driver.agent_came(host, now=self.now)

    def drop_agent(self, host: str) -> None:
        self.agents.discard(host)
        for process in self.on(host):
            process.lives = process.in_world = False

    def start_worker(self, worker: StartWorker) -> None:
        assert worker.host in self.agents
        assert worker.number not in self.processes
        self.processes[worker.number] = Puppet(worker.number, worker.host, worker.slot, worker)
        if not self.slow_workers:
            self.driver.worker_said(worker.number, ["hello", 1], now=self.now)

    def signal(self, number: int, signal_number: int) -> None:
        self.processes[number].ended.append(signal_number == signal.SIGKILL)

    def tell(self, numbers: tuple[int, ...], frame: list[Any]) -> None:
        for number in numbers:
            self.hear(self.processes[number], frame)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def look(self, now: float) -> None:
        """See nothing."""

    def hear(self, process: Puppet, frame: list[Any]) -> None:
        process.frames.append(frame)
        match frame:
            case ["world", epoch, _, _, _, commit]:
                process.epoch, process.in_world, process.checks = epoch, True, 0
                if commit:
                    process.commit = commit
                process.frames = [each for each in process.frames if each[0] != "raise"]
            case ["regroup", epoch, _, _]:
                if process.lives and epoch == process.epoch and process.number not in self.busy:
                    assert not process.cause, "a worker that has raised is told of a loss"
                    process.in_world = False
                    frame = ["ready", process.epoch, process.commit]
                    self.driver.worker_said(process.number, frame, now=self.now)
            case ["notice", counter, _]:
                assert not process.cause, "a worker that has raised is asked for its checks"
                frame = ["checks", counter, process.checks]
                if process.lives:
                    self.driver.worker_said(process.number, frame, now=self.now)

    def check_world(self, world: list[Any]) -> None:
        members = [self.processes[number] for number in world[1]]
        assert all(each.lives for each in members), "a dead member"
        assert not any(each.cause for each in members), "it has raised"

    # -- questions

    def on(self, host: str) -> list[Puppet]:
        return [process for process in self.processes.values() if process.host == host]

    @property
    def members(self) -> list[int]:
        """The numbers of the workers of the last world, in rank order."""
        return self.worlds[-1][1] if self.worlds else []

    @property
    def hosts(self) -> str:
        """The hosts of the last world, in rank order, in one word where they have one letter."""
        return "".join(self.processes[number].host for number in self.members)

    def return_all(self, numbers: Iterable[int] | None = None) -> None:
        for number in self.members if numbers is None else numbers:
            self.end(number, 0)


def running(hosts: dict[str, int], **plan: object) -> JobByHand:
    """Return a job with a commit."""
    job = JobByHand(hosts, **{"min_np": 1, **plan})
    job.commit(4)
    return job


def finished(job: JobByHand) -> tuple[int, str]:
    """Return exit code and sentence of a job that has ended."""
    assert job.finish is not None
    return job.finish.code, job.finish.sentence
