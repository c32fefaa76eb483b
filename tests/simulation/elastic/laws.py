"""What must hold of the commands of the driver of an elastic job, in whatever order events come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol
from unittest.mock import patch

from hvdlite.launcher.decisions import commands
from hvdlite.launcher.decisions.driver import Driver
from hvdlite.launcher.elastic import driver_loop
from hvdlite.launcher.elastic.driver_loop import DriverLoop
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


class SeededDriver(Driver):
    """A driver that knows chance by `uniform`, and whose news of ends are noted in `dead`."""

    def __init__(self, plan: commands.ElasticPlan, uniform: Callable[[], float]) -> None:
        super().__init__(plan, uniform)
        self.dead: set[int] = set()

    def worker_ended(
        self, number: int, code: int, cause: str | None, by_signal: bool, now: float
    ) -> None:
        self.dead.add(number)
        super().worker_ended(number, code, cause, by_signal, now)


def seeded(uniform: Callable[[], float]) -> Any:
    """Let drivers that are made meanwhile be seeded ones."""
    return patch.object(driver_loop, "Driver", partial(SeededDriver, uniform=uniform))


class Watched(DriverLoop):
    """Checks the commands of a driver before they are carried out."""

    worlds: list[list[Any]]  # [epoch, numbers, root, behind, commit]
    processes: Mapping[int, Process]
    driver: SeededDriver

    def watch(self, processes: Mapping[int, Process]) -> None:
        """Begin to watch a job that has these workers, by number."""
        self.worlds, self.processes = [], processes

    def _do(self, command: commands.Command) -> None:
        if self.finish is not None:
            raise BrokenError(ORDER, f"{command} after the end")
        match command:
            case commands.StartWorker(_, host, slot):
                self._check_slot(host, slot)
            case commands.Tell(numbers, ["world", *_] as frame):
                self._note_world(numbers, frame)
        super()._do(command)

    def check_world(self, world: list[Any]) -> None:
        """Check what else holds of a world that is told: [epoch, numbers, root, behind, commit]."""

    # -- parts

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

    def _check_order(self, epoch: int, numbers: list[int]) -> None:
        most = self.driver.plan.max_np
        if most is not None and len(numbers) > max(2, most):  # Two where one hands over.
            raise BrokenError(SLOTS, f"world {epoch} has {numbers}, and {most} are allowed")
        dead = [number for number in numbers if number in self.driver.dead]
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
