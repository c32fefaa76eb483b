"""Carries out what the driver of an elastic job decides, by whoever starts its workers."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from typing import Any

from hvdlite.common.meeting.placement import place_variables
from hvdlite.launcher.decisions import commands
from hvdlite.launcher.decisions.commands import ElasticPlan
from hvdlite.launcher.decisions.driver import Driver
from hvdlite.launcher.processes.event_loop import EventLoop

# What scripts for Horovod find in elastic jobs: these connect the ranks by TCP, too.
OF_HOROVOD = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}


class DriverLoop(ABC):
    """A driver, and the loop in which its commands are carried out."""

    def __init__(self, plan: ElasticPlan, loop: EventLoop, look_seconds: float = 1.0) -> None:
        self.driver = Driver(plan)
        self.loop = loop
        self.finish: commands.Finish | None = None  # Set when the job is over.
        loop.look_every(look_seconds, self.look)

    # -- commands, which `carry_out` calls

    @abstractmethod
    def start_agent(self, host: str) -> None:
        """See `commands.StartAgent`."""

    @abstractmethod
    def drop_agent(self, host: str) -> None:
        """See `commands.DropAgent`."""

    @abstractmethod
    def start_worker(self, worker: commands.StartWorker) -> None:
        """See `commands.StartWorker`."""

    @abstractmethod
    def signal(self, number: int, signal_number: int) -> None:
        """End a worker by SIGTERM or SIGKILL; see `commands.EndWorker`."""

    @abstractmethod
    def tell(self, numbers: tuple[int, ...], frame: list[Any]) -> None:
        """See `commands.Tell`."""

    @abstractmethod
    def say(self, line: str) -> None:
        """Show a line to the user."""

    @abstractmethod
    def look(self, now: float) -> None:
        """Look for what has gone without a word."""

    # -- the loop

    def wait(self, *times: float) -> float:
        """Do what was decided, wait until something comes or is due, and look; return the time.

        `times` are those at which the caller has something to do.
        """
        self.carry_out()
        due = None if self.finish is not None else self.driver.due()
        return self.loop.wait(*times, *([] if due is None else [due]))

    def carry_out(self) -> None:
        """Do all that the driver has decided. After the end, nothing is started any more."""
        while orders := self.driver.take():
            for command in orders:
                self._do(command)

    def _do(self, command: commands.Command) -> None:
        match command:
            case commands.Say(line):
                self.say(line)
            case commands.Tell(numbers, frame):
                self.tell(numbers, frame)
            case commands.EndWorker(number, kill):
                self.signal(number, signal.SIGKILL if kill else signal.SIGTERM)
            case commands.DropAgent(host):
                self.drop_agent(host)
            case commands.StartAgent(host) if self.finish is None:
                self.start_agent(host)
            case commands.StartWorker() if self.finish is None:
                self.start_worker(command)
            case commands.Finish():
                self.finish = command


def worker_variables(worker: commands.StartWorker, as_horovod: bool) -> dict[str, str]:
    """Return the variables that tell a worker its number and its place at the start.

    Those of its host come beside them. They are never updated later.
    """
    known = {**worker.place, "HOSTNAME": worker.host, "ELASTIC": 1}
    variables = place_variables(known, as_horovod)
    return variables | {"HVDLITE_WORKER": str(worker.number)} | (OF_HOROVOD if as_horovod else {})
