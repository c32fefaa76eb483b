"""What starts the agents and workers of an elastic job, and tells its driver what becomes of them.

The driver is the real one. Whoever plays the hosts and workers (job.py by a seed, by_hand.py by a
test) says what a command does; what must hold of commands in any order is checked here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from hvdlite.launcher.decisions import commands
from hvdlite.launcher.decisions.commands import ElasticPlan, Finish
from hvdlite.launcher.decisions.driver import Driver
from tests.simulation.world import BrokenError

ORDER, SLOTS = (
    "all ranks agree on their worlds",
    "a slot has one process, and a job no more than it may have",
)


class Process(Protocol):
    """What the launcher knows of a worker."""

    host: str
    slot: int
    lives: bool


class Launcher(ABC):
    """A driver whose commands are carried out in a world."""

    def __init__(self, plan: ElasticPlan, uniform: Callable[[], float]) -> None:
        self.plan = plan
        self.driver = Driver(plan, uniform)
        self.finish: Finish | None = None
        self.agents: set[str] = set()
        self.worlds: list[list[Any]] = []  # [epoch, numbers, root, behind, commit]
        self._known_dead: set[int] = set()

    @property
    @abstractmethod
    def processes(self) -> Mapping[int, Process]:
        """The workers by number."""

    @abstractmethod
    def begin_agent(self, host: str) -> None:
        """Let an agent be on its way."""

    @abstractmethod
    def end_agent(self, host: str) -> None:
        """End an agent with its workers."""

    @abstractmethod
    def begin_worker(self, start: commands.StartWorker) -> None:
        """Start a process."""

    @abstractmethod
    def end_worker(self, number: int, *, kill: bool) -> None:
        """Signal a process."""

    @abstractmethod
    def send(self, numbers: tuple[int, ...], frame: list[Any]) -> None:
        """Send a frame to workers."""

    @abstractmethod
    def say(self, line: str) -> None:
        """Take a line for the user."""

    # -- events and commands

    def happen(self, name: str, *arguments: Any, now: float) -> None:
        """Let the driver hear of an event, and do what it decides."""
        if name == "worker_ended":
            self._known_dead.add(arguments[0])
        getattr(self.driver, name)(*arguments, now=now)
        self.carry_out()

    def carry_out(self) -> None:
        """Do what the driver has decided."""
        while orders := self.driver.take():
            for order in orders:
                self._obey(order)

    def _obey(self, command: commands.Command) -> None:
        if self.finish is not None:
            raise BrokenError(ORDER, f"{command} after the end")
        match command:
            case commands.StartAgent(host):
                self.begin_agent(host)
            case commands.DropAgent(host):
                self.agents.discard(host)
                self.end_agent(host)
            case commands.StartWorker(_, host, slot):
                self._check_slot(host, slot)
                self.begin_worker(command)
            case commands.EndWorker(number, kill):
                self.end_worker(number, kill=kill)
            case commands.Tell(numbers, frame):
                if frame[0] == "world":
                    self._note_world(numbers, frame)
                self.send(numbers, frame)
            case commands.Say(line):
                self.say(line)
            case Finish():
                self.finish = command

    # -- invariants

    def _check_slot(self, host: str, slot: int) -> None:
        here = [number for number, each in self.processes.items() if each.host == host]
        others = [n for n in here if self.processes[n].lives and self.processes[n].slot == slot]
        if others:
            raise BrokenError(SLOTS, f"slot {slot} of {host} still has {others}")

    def _note_world(self, told: tuple[int, ...], frame: list[Any]) -> None:
        _, epoch, members, *sync = frame
        numbers = [number for number, _ in members]
        if epoch != len(self.worlds) + 1:
            raise BrokenError(ORDER, f"world {epoch} of {numbers} after {self.worlds}")
        if [*told] != numbers:
            raise BrokenError(ORDER, f"{told} are told of a world of {numbers}")
        hosts = [self.processes[number].host for number in numbers]
        if hosts != [host for _, host in members]:
            raise BrokenError(ORDER, f"the members {members} are on {hosts}")
        self._check_order(epoch, numbers)
        self.worlds.append([epoch, numbers, *sync])
        self.check_world(self.worlds[-1])

    @abstractmethod
    def check_world(self, world: list[Any]) -> None:
        """Check what else holds of a world that is told: [epoch, numbers, root, behind, commit]."""

    def _check_order(self, epoch: int, numbers: list[int]) -> None:
        most = self.plan.max_np
        if most is not None and len(numbers) > max(2, most):  # Two where one hands over.
            raise BrokenError(SLOTS, f"world {epoch} has {numbers}, and {most} are allowed")
        dead = [number for number in numbers if number in self._known_dead]
        if dead:
            raise BrokenError(ORDER, f"world {epoch} has {dead}, whose ends the driver knows")
        if epoch == 1:
            return
        before = self.worlds[-1][1]
        kept = [number for number in numbers if number in before]
        if kept != [number for number in before if number in numbers]:
            raise BrokenError(ORDER, f"ranks swap their order: {numbers} after {before}")
        if numbers[0] not in before:
            raise BrokenError(ORDER, f"rank 0 of {numbers} is new, after {before}")
