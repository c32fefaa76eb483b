"""What every way to run ranks has in common with the job that it runs them for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.jobs.first_failure import FirstFailure
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.processes.output import Output


@dataclass(frozen=True)
class JobContext:
    """A job as the way to run its ranks sees it."""

    options: LaunchOptions
    environ: Mapping[str, str]  # of the ranks
    loop: EventLoop
    first_failure: FirstFailure  # is told of starts, exceptions and ends
    output: Output  # gets what the ranks print

    @property
    def all_started(self) -> bool:
        """Every rank has started."""
        return len(self.first_failure.started) == self.options.num_proc


@dataclass(frozen=True)
class StartFailure:
    """Why ranks could not be started, and the exit code that the job gets from it."""

    code: int
    sentence: str


class Runner(Protocol):
    """A way to run ranks: mpirun, or agents."""

    name: str  # for people

    def describe(self) -> list[str]:
        """Return the command lines that it starts, for --verbose."""

    def start(self) -> None:
        """Begin to start the ranks; blocks for no host."""

    def running(self) -> bool:
        """Return whether something of it is still to be read or waited for."""

    def look(self) -> None:
        """Look, about once a second, for what has gone without a word."""

    def keep_alive(self) -> None:
        """Do what may not wait while nobody reads the launcher's output."""

    def begin_end(self) -> None:
        """Take note that the job is being ended from now on."""

    def signal(self, number: int) -> None:
        """Signal the ranks, and what is still about to start them."""

    def abandon(self) -> None:
        """Kill what stands around the ranks: it had its time."""

    def finish(self) -> None:
        """Read what is left, and wait for what was started."""

    def late(self, missing: list[int]) -> list[int]:
        """Return those of the ranks that have not started for whom the others wait."""

    def failure(self) -> StartFailure | None:
        """Return why it failed before any rank did."""

    def close(self, kill: bool) -> None:
        """Leave nothing behind; `kill` what may be left of the ranks."""
