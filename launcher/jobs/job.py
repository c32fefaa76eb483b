"""Runs one job: waits for all that occurs in it, and ends its processes together."""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.decisions import endings
from hvdlite.launcher.decisions.endings import Ending, FirstFailure
from hvdlite.launcher.jobs.outcome import (
    NOT_STARTED_CODE,
    JobOutcome,
    failure_sentence,
    name_ranks,
    signal_outcome,
    timeout_sentence,
)
from hvdlite.launcher.live.live_view import LiveView
from hvdlite.launcher.processes.console import Console
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.processes.output import Output
from hvdlite.launcher.processes.signals import SignalInbox

LOOK_SECONDS = 1.0


class Job(ABC):
    """One run of one command. One thread waits for everything, and decides what follows."""

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        self.options, self.environ = options, environ  # The environment is that of the ranks.
        self.signals = SignalInbox()
        self.output = Output(
            options.ranks, options.output_filename, options.prefix_timestamp,
            Console(give_up=self._reader_is_slow), options.debug_rank,
            note_broken_pipe=self.signals.note_broken_pipe, elastic=options.elastic is not None,
        )  # fmt: skip
        self.loop = EventLoop()
        self.ending: Ending | None = None
        self.live = LiveView(options.live, self.loop, self.say, self.output.console, self)

    def run(self) -> JobOutcome:
        """Run to the end. When this returns, no process and no file of the job is left."""
        try:
            with self.signals:
                self.loop.listen(self.signals.fileno(), self.signals.drain)
                self.start()
                # The processes take a while to start, so that this costs no time.
                self.loop.post(lambda: self.live.serve(self._about()))
                while self.running():
                    self._turn()
                self.finish()
                with contextlib.suppress(BrokenPipeError):
                    self.output.finish()
                outcome = self.conclude()
                self.live.end(outcome.sentence)
                return outcome
        finally:
            self.close()
            self.live.close()
            self.loop.close()
            self.output.close()

    def _about(self) -> dict[str, Any]:
        """Tell which job this is, for those who look at it."""
        about = {
            "pid": os.getpid(), "command": list(self.options.command), "directory": "",
            "ranks": self.options.num_proc, "started": time.time(),
        }  # fmt: skip
        with contextlib.suppress(OSError):  # The folder has just been deleted.
            about["directory"] = os.getcwd()
        return about

    def _turn(self) -> None:
        """Wait for what comes next, and do what is due."""
        now = self.wait(*([self.ending.due] if self.ending else []))
        plan = self.next_plan(now)
        if plan is not None:
            self.ending = Ending.begin(plan, now)
        while self.ending and (step := self.ending.next_step(now)):
            if step == endings.ABANDON:
                self.abandon()
            else:
                self.signal_all(endings.SIGNALS[step])

    def say(self, line: str) -> None:
        """Print a line of hvdlite-run's own."""
        self.output.write("stderr", f"hvdlite-run: {line}\n".encode(errors="backslashreplace"))

    def _reader_is_slow(self) -> bool:
        """Return whether a reader of our output who does not read is not waited for any more."""
        self.keep_alive()
        return self.signals.received is not None

    @abstractmethod
    def start(self) -> None:
        """Begin to start the processes; blocks for no host."""

    @abstractmethod
    def running(self) -> bool:
        """Return whether something is still to be read or waited for."""

    @abstractmethod
    def wait(self, *times: float) -> float:
        """Wait until something comes or a look is due, at most until one of `times`."""

    def keep_alive(self) -> None:  # noqa: B027 - there may be nothing to do
        """Do what may not wait while nobody reads the launcher's output."""

    @abstractmethod
    def order(self, number: int, line: str) -> str:
        """Give an order to a process, if it listens; return why that cannot be, or ""."""

    @abstractmethod
    def let_count(self) -> None:
        """Let all ranks count from now on, also those that are not started yet."""

    @abstractmethod
    def next_plan(self, now: float) -> endings.Plan | None:
        """Return the plan by which the job is ended from now on; None: as before."""

    @abstractmethod
    def signal_all(self, number: int) -> None:
        """Signal the processes of the job, and what is still about to start them."""

    @abstractmethod
    def abandon(self) -> None:
        """Kill what stands around the processes: it had its time."""

    @abstractmethod
    def finish(self) -> None:
        """Read what is left, and wait for what was started."""

    @abstractmethod
    def conclude(self) -> JobOutcome:
        """Return how the job has ended."""

    @abstractmethod
    def close(self) -> None:
        """Leave no process and no file of the job behind."""


class FixedJob(Job):
    """A job that keeps its ranks: the first that fails ends it. Agents start them, or an mpirun."""

    name: str  # What starts the ranks, for people.

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        super().__init__(options, environ)
        # Is told of starts, exceptions and ends.
        self.first_failure = FirstFailure()
        self.timed_out = False
        self._start_by = self.loop.now() + options.start_timeout_seconds
        self.loop.look_every(LOOK_SECONDS, self.look)

    @abstractmethod
    def describe(self) -> list[str]:
        """Return the command lines that are started, for --verbose."""

    @abstractmethod
    def look(self, now: float) -> None:
        """Look, about once a second, for what has gone without a word."""

    @abstractmethod
    def begin_end(self) -> None:
        """Take note that the job is being ended from now on."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Signal the ranks, and what is still about to start them."""

    def late(self, missing: list[int]) -> list[int]:
        """Return those of the ranks that have not started for whom the others wait."""
        return missing

    @abstractmethod
    def failure(self) -> JobOutcome | None:
        """Return why the start failed before any rank did."""

    @property
    def all_started(self) -> bool:
        return len(self.first_failure.started) == self.options.num_proc

    def wait(self, *times: float) -> float:
        return self.loop.wait(*times)

    def signal_all(self, number: int) -> None:
        self.first_failure.closed = True
        self.signal(number)

    def next_plan(self, now: float) -> endings.Plan | None:
        plan = self._find_plan(now >= self._start_by)
        if plan is not None:
            self.begin_end()
        return plan

    def _find_plan(self, too_late: bool) -> endings.Plan | None:
        """Signals come before all else."""
        number = self.signals.take()
        if number is not None:
            return endings.AFTER_SIGNAL.get(number, endings.AFTER_SIGTERM)
        if self.ending is not None:
            return None
        if self.first_failure.trouble:
            return endings.AFTER_FAILURE
        if len(self.first_failure.codes) == self.options.num_proc:
            return endings.AFTER_ALL_RANKS
        if too_late and not self.all_started:
            self.timed_out = True
            return endings.AFTER_SIGTERM
        return None

    def conclude(self) -> JobOutcome:
        heard = self.first_failure
        # Who is missing now was ended together with those that failed.
        heard.closed |= heard.trouble
        for rank in heard.running:
            heard.lose(rank)
        for rank, cause in self.output.causes().items():
            heard.causes.setdefault(rank, cause)
        # A signal comes before the failure of a rank, and that before the failure of a start.
        if self.signals.received is not None:
            return signal_outcome(self.signals.received)
        missing = [rank for rank in self.options.ranks if rank not in heard.started]
        if self.timed_out:
            sentence = timeout_sentence(self.late(missing), self.options)
            return JobOutcome(NOT_STARTED_CODE, sentence)
        failure = heard.failure()
        if failure is not None:
            sentence = failure_sentence(failure, heard.codes, self.options.cluster)
            return JobOutcome(failure.code, sentence, failure)
        start_failure = self.failure()
        if start_failure is None and missing:
            text = f"{self.name} ended before {name_ranks(missing, self.options)} had started"
            return JobOutcome(NOT_STARTED_CODE, text)
        return start_failure or JobOutcome()
