"""A job without processes: carries out the commands of a driver, and moves its clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hvdlite.launcher.decisions.commands import (
    DropAgent,
    ElasticPlan,
    EndWorker,
    Finish,
    Say,
    StartAgent,
    StartWorker,
    Tell,
)
from hvdlite.launcher.decisions.driver import Driver


@dataclass
class Process:
    """A worker as the operating system sees it."""

    number: int
    host: str
    slot: int
    start: StartWorker
    alive: bool = True
    frames: list[list[Any]] = field(default_factory=list)
    epoch: int = 0
    commit: int = 0
    checks: int = 0
    in_world: bool = False
    cause: str = ""  # The exception that ends it.
    ended: list[bool] = field(default_factory=list)  # One `kill` for each order to end.

    def last(self, kind: str) -> list[Any] | None:
        return next((frame for frame in reversed(self.frames) if frame[0] == kind), None)


class Simulation:
    """Agents come at once and workers say hello at once, unless they are told not to."""

    def __init__(self, hosts: dict[str, int] | None = None, **plan: Any) -> None:
        plan.setdefault("min_np", plan.setdefault("num_proc", sum((hosts or {}).values()) or 1))
        uniform: Callable[[], float] = plan.pop("uniform", lambda: 0.0)
        self.driver = Driver(ElasticPlan(**plan), uniform)
        self.now = 100.0
        self.processes: dict[int, Process] = {}
        self.agents: set[str] = set()
        self.lines: list[str] = []
        self.worlds: list[list[Any]] = []  # [epoch, members, root, behind, commit]
        self.finish: Finish | None = None
        self.slow_hosts: set[str] = set()  # Their agents come when `agent` says so.
        self.slow_workers = False  # Newcomers say hello when `hello` says so.
        self.busy: set[int] = set()  # They do not answer a regroup.
        self.event("tick")
        if hosts is not None:
            self.discover(hosts)

    # -- events

    def event(self, name: str, *arguments: Any) -> None:
        getattr(self.driver, name)(*arguments, now=self.now)
        self.settle()

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
        assert process.alive
        process.alive = process.in_world = False
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
        self.agents.discard(host)
        for process in self.on(host):
            process.alive = process.in_world = False
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
            if process.alive and process.in_world and frame is not None:
                self.ready(number)

    def newcomers_ready(self) -> None:
        for process in list(self.processes.values()):
            if process.alive and process.epoch == 0 and process.last("newcomer"):
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

    def settle(self) -> None:
        while commands := self.driver.take():
            for command in commands:
                self.obey(command)

    def obey(self, command: Any) -> None:
        assert self.finish is None, f"{command} after the end"
        match command:
            case StartAgent(host):
                assert host not in self.agents
                if host not in self.slow_hosts:
                    self.agents.add(host)
                    self.driver.agent_came(host, now=self.now)
            case DropAgent(host):
                self.agents.discard(host)
                for process in self.on(host):
                    process.alive = process.in_world = False
            case StartWorker(number, host, slot):
                assert host in self.agents
                assert number not in self.processes
                assert not any(each.slot == slot and each.alive for each in self.on(host))
                self.processes[number] = Process(number, host, slot, command)
                if not self.slow_workers:
                    self.driver.worker_said(number, ["hello", 1], now=self.now)
            case EndWorker(number, kill):
                self.processes[number].ended.append(kill)
            case Tell(numbers, frame):
                for number in numbers:
                    self.hear(self.processes[number], frame)
            case Say(line):
                self.lines.append(line)
            case Finish():
                self.finish = command

    def hear(self, process: Process, frame: list[Any]) -> None:
        process.frames.append(frame)
        match frame:
            case ["world", epoch, members, root, behind, commit]:
                self.note_world(process, epoch, members, [root, behind, commit])
            case ["regroup", epoch, _, _]:
                if process.alive and epoch == process.epoch and process.number not in self.busy:
                    assert not process.cause, "a worker that has raised is told of a loss"
                    process.in_world = False
                    frame = ["ready", process.epoch, process.commit]
                    self.driver.worker_said(process.number, frame, now=self.now)
            case ["notice", counter, _]:
                assert not process.cause, "a worker that has raised is asked for its checks"
                frame = ["checks", counter, process.checks]
                if process.alive:
                    self.driver.worker_said(process.number, frame, now=self.now)

    def note_world(self, process: Process, epoch: int, members: Any, sync: list[Any]) -> None:
        numbers = [number for number, _ in members]
        assert process.number in numbers
        assert [self.processes[number].host for number in numbers] == [host for _, host in members]
        world = [epoch, numbers, *sync]
        if not self.worlds or self.worlds[-1][0] != epoch:
            assert all(self.processes[number].alive for number in numbers), "a dead member"
            assert not any(self.processes[number].cause for number in numbers), "it has raised"
            assert epoch == len(self.worlds) + 1
            if self.worlds:
                before = self.worlds[-1][1]
                kept = [number for number in numbers if number in before]
                assert kept == [number for number in before if number in numbers], "ranks swapped"
                assert numbers[0] in before, "rank 0 is a newcomer"
            self.worlds.append(world)
        assert self.worlds[-1] == world, "two worlds of one epoch"
        process.epoch, process.in_world, process.checks = epoch, True, 0
        if sync[2]:
            process.commit = sync[2]
        process.frames = [each for each in process.frames if each[0] != "raise"]

    # -- questions

    def on(self, host: str) -> list[Process]:
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
