"""Carries out what the driver of an elastic job decides, by whoever starts its workers."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, Protocol

from hvdlite.launcher.elastic.decisions import commands
from hvdlite.launcher.elastic.decisions.driver import Driver


class Crew(Protocol):
    """Starts agents and workers, and tells the driver what becomes of them."""

    def start_agent(self, host: str) -> None:
        """See `commands.StartAgent`."""

    def drop_agent(self, host: str) -> None:
        """See `commands.DropAgent`."""

    def start_worker(self, worker: commands.StartWorker) -> None:
        """See `commands.StartWorker`."""


class Workers(Protocol):
    """The workers that have not ended."""

    def signal(self, number: int, signal_number: int) -> None:
        """End a worker by SIGTERM or SIGKILL; see `commands.EndWorker`."""

    def tell(self, numbers: tuple[int, ...], frame: list[Any]) -> None:
        """See `commands.Tell`."""


class Driving:
    """A driver with its crew; ``say(line)`` shows a line to the user."""

    def __init__(
        self, driver: Driver, crew: Crew, workers: Workers, say: Callable[[str], None]
    ) -> None:
        self.driver = driver
        self.finish: commands.Finish | None = None  # Set when the job is over.
        self._crew, self._workers, self._say = crew, workers, say

    def due(self) -> list[float]:
        """Return when the driver has something to decide; nothing where only events matter."""
        due = None if self.finish is not None else self.driver.due()
        return [] if due is None else [due]

    def carry_out(self) -> None:
        """Do all that the driver has decided. After the end, nothing is started any more."""
        while orders := self.driver.take():
            for command in orders:
                self._do(command)

    def _do(self, command: commands.Command) -> None:
        crew, workers = self._crew, self._workers
        match command:
            case commands.Say(line):
                self._say(line)
            case commands.Tell(numbers, frame):
                workers.tell(numbers, frame)
            case commands.EndWorker(number, kill):
                workers.signal(number, signal.SIGKILL if kill else signal.SIGTERM)
            case commands.DropAgent(host):
                crew.drop_agent(host)
            case commands.StartAgent(host) if self.finish is None:
                crew.start_agent(host)
            case commands.StartWorker() if self.finish is None:
                crew.start_worker(command)
            case commands.Finish():
                self.finish = command
