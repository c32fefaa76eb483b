"""Runs one job: listens to the ranks, and ends all processes together, however they are started."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping

from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.jobs import termination_plan as ending
from hvdlite.launcher.jobs.first_failure import FirstFailure
from hvdlite.launcher.jobs.outcome import End, JobOutcome, conclude
from hvdlite.launcher.jobs.runner import JobContext, Runner
from hvdlite.launcher.jobs.termination_plan import Ending
from hvdlite.launcher.processes.console import Console
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.processes.output import Output
from hvdlite.launcher.processes.signals import SignalInbox

LOOK_SECONDS = 1.0


class Job:
    """One run of one command on all ranks, which the runner that `make_runner` makes starts."""

    def __init__(
        self, options: LaunchOptions, environ: Mapping[str, str],
        make_runner: Callable[[JobContext], Runner],
    ) -> None:  # fmt: skip
        self.options = options
        self.signals = SignalInbox()
        self.console = Console(give_up=self._reader_is_slow)
        self.output = Output(
            options.ranks, options.output_filename, options.prefix_timestamp,
            self.console, options.debug_rank, note_broken_pipe=self.signals.note_broken_pipe,
        )  # fmt: skip
        self.loop = EventLoop()
        self.first_failure = FirstFailure()
        self.ending: Ending | None = None
        self.timed_out = False
        self.runner = make_runner(
            JobContext(options, environ, self.loop, self.first_failure, self.output)
        )

    def run(self) -> JobOutcome:
        """Run to the end. When this returns, no process and no file of the job is left."""
        try:
            with self.signals:
                self.loop.listen(self.signals.fileno(), self.signals.drain)
                self.runner.start()
                self._watch()
                outcome = self._conclude()
        finally:
            failed = self.first_failure.closed or self.first_failure.trouble
            self.runner.close(kill=failed or self.ending is not None)
            self.loop.close()
            self.output.close()
        return outcome

    def _reader_is_slow(self) -> bool:
        """Return whether a reader of our output who does not read is not waited for any more."""
        self.runner.keep_alive()
        return self.signals.received is not None

    # -- while it runs

    def _watch(self) -> None:
        start_deadline = time.monotonic() + self.options.start_timeout_seconds
        next_look = time.monotonic() + LOOK_SECONDS
        while self.runner.running():
            due = min(next_look, self.ending.due) if self.ending else next_look
            self.loop.run_once(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            if now >= next_look:
                self.runner.look()
                next_look = now + LOOK_SECONDS
            self._decide(now, too_late=now >= start_deadline)

    def _decide(self, now: float, too_late: bool) -> None:
        plan = self._plan(too_late)
        if plan is not None:
            self.runner.begin_end()
            self.ending = Ending.begin(plan, now)
        while self.ending and (step := self.ending.next_step(now)):
            if step == ending.ABANDON:
                self.runner.abandon()
            else:
                self.first_failure.closed = True
                self.runner.signal(ending.SIGNALS[step])

    def _plan(self, too_late: bool) -> ending.Plan | None:
        """Return the plan to begin with now, if any: signals come before all else."""
        number = self.signals.take()
        if number is not None:
            return ending.AFTER_SIGNAL.get(number, ending.AFTER_SIGTERM)
        if self.ending is not None:
            return None
        if self.first_failure.trouble:
            return ending.AFTER_FAILURE
        if len(self.first_failure.codes) == self.options.num_proc:
            return ending.AFTER_ALL_RANKS
        if too_late and len(self.first_failure.started) < self.options.num_proc:
            self.timed_out = True
            return ending.AFTER_SIGTERM
        return None

    # -- the end

    def _conclude(self) -> JobOutcome:
        self.runner.finish()
        # Who is missing now was ended together with those that failed.
        self.first_failure.closed |= self.first_failure.trouble
        for rank in self.first_failure.running:
            self.first_failure.lose(rank)
        with contextlib.suppress(BrokenPipeError):
            self.output.finish()
        for rank, cause in self.output.causes().items():
            self.first_failure.causes.setdefault(rank, cause)
        started = self.first_failure.started
        missing = [rank for rank in self.options.ranks if rank not in started]
        end = End(
            late=self.runner.late(missing),
            runner=self.runner.name,
            failure=self.runner.failure(),
            signal=self.signals.received,
            timed_out=self.timed_out,
        )
        return conclude(end, self.first_failure, self.options)
