"""Runs one job: starts mpirun, listens to the ranks, and ends all processes together."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hvdlite.launcher import termination_plan as ending
from hvdlite.launcher.cleanup import kill_session, remove_segments
from hvdlite.launcher.commands import RANK_VARIABLE, Place, build_command
from hvdlite.launcher.environment import is_root, names_for_other_hosts
from hvdlite.launcher.first_failure import Failure, Verdict
from hvdlite.launcher.mpi import OPENMPI, Mpi
from hvdlite.launcher.options import Options
from hvdlite.launcher.output import STREAMS, Output
from hvdlite.launcher.pipes import Channels
from hvdlite.launcher.rank_shell import wrap
from hvdlite.launcher.signals import SignalInbox, die_with_parent
from hvdlite.launcher.termination_plan import Ending

LOOK_SECONDS = 1.0  # how often we look whether a shell has gone without a word
NOT_STARTED_CODE = 1


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `sentence` is for people, and empty when all went well."""

    code: int = 0
    sentence: str = ""
    failure: Failure | None = None
    signal: int | None = None


class Job:
    """One run of one command on all ranks."""

    def __init__(self, mpi: Mpi, options: Options, environ: Mapping[str, str]) -> None:
        self.mpi = mpi
        self.options = options
        self.output = Output(options.num_proc, options.output_filename, options.prefix_timestamp)
        self.directory = tempfile.mkdtemp(prefix="hvdlite-run-")  # only the user may enter it
        # Open MPI's session directory lies in ours, and goes with it.
        self.environ = {**environ, "PRTE_MCA_prte_local_tmpdir_base": self.directory}
        self.token = f"hvdlite-rank-{secrets.token_hex(8)}"
        self.verdict = Verdict()
        self.channels = Channels(self.directory, self.token, mpi.kind, self.verdict, self.output)
        self.signals = SignalInbox()
        self.ending: Ending | None = None
        self.timed_out = False
        self.process: subprocess.Popen[bytes] | None = None

    def run(self) -> Outcome:
        """Run to the end. When this returns, no process and no file of the job is left."""
        began = time.time()
        try:
            with self.signals:
                process = self._start()
                self._watch(process)
                outcome = self._outcome(self._reap(process))
        finally:
            self._clean_up()
        if outcome.code:
            remove_segments(began)
        return outcome

    def command_line(self) -> list[str]:
        """The whole command that starts the job."""
        place = Place(root=is_root(), names=names_for_other_hosts(self.environ))
        rank_command = wrap(
            self.options.command,
            token=self.token,
            rank_variable=RANK_VARIABLE[self.mpi.kind],
            directory=self.directory,
        )
        return build_command(self.mpi, self.options, place, rank_command)

    def _start(self) -> subprocess.Popen[bytes]:
        self.channels.make_pipes(self.options.num_proc)
        self.channels.listen(self.signals.fileno(), self.signals.drain)
        on_death = signal.SIGTERM if self.mpi.kind == OPENMPI else signal.SIGKILL
        self.process = process = subprocess.Popen(
            self.command_line(),
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C comes to us alone; we end the job in order
            preexec_fn=die_with_parent(on_death),  # noqa: PLW1509 - it makes one system call
        )
        for stream, pipe in zip(STREAMS, (process.stdout, process.stderr), strict=True):
            assert pipe is not None
            self.channels.listen_to_mpirun(stream, pipe)
        return process

    # -- while it runs

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        start_deadline = time.monotonic() + self.options.start_timeout_seconds
        next_look = time.monotonic() + LOOK_SECONDS
        while self.channels.mpirun_streams and process.poll() is None:
            due = min(next_look, self.ending.due) if self.ending else next_look
            self._read(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            if now >= next_look:
                self._look_for_lost()
                next_look = now + LOOK_SECONDS
            self._decide(now, too_late=now >= start_deadline)

    def _read(self, timeout_seconds: float) -> bool:
        try:
            return self.channels.read(timeout_seconds)
        except BrokenPipeError:  # as in: hvdlite-run ... | head
            self.signals.note_broken_pipe()
            _discard_output()
            return True

    def _look_for_lost(self) -> None:
        here = [rank for rank in self.verdict.running if rank in self.verdict.here]
        gone = [rank for rank in here if not _exists(self.verdict.shells[rank])]
        self._read(0.0)  # a shell's last word comes before its end
        for rank in gone:
            if rank in self.verdict.running:
                self.verdict.lose(rank)

    def _decide(self, now: float, too_late: bool) -> None:
        plan = self._plan(too_late)
        if plan is not None:
            self.ending = Ending.begin(plan, now)
            self.channels.hush = True
        while self.ending and (step := self.ending.next_step(now)):
            self._take(step)

    def _plan(self, too_late: bool) -> ending.Plan | None:
        """The plan to begin with now, if any: signals come before all else."""
        number = self.signals.take()
        if number is not None:
            return ending.AFTER_SIGNAL.get(number, ending.AFTER_SIGTERM)
        if self.ending is not None:
            return None
        if self.verdict.trouble:
            return ending.AFTER_FAILURE
        if len(self.verdict.codes) == self.options.num_proc:
            return ending.AFTER_ALL_RANKS
        if too_late and len(self.verdict.shells) < self.options.num_proc:
            self.timed_out = True
            return ending.AFTER_SIGTERM
        return None

    # -- the end

    def _take(self, step: str) -> None:
        if step == ending.ABANDON:
            self._signal_mpirun(signal.SIGKILL)
            return
        self.verdict.closed = True
        number = ending.SIGNALS[step]
        self._signal_ranks(number)
        if self.options.remote or len(self.verdict.shells) < self.options.num_proc:
            self._signal_mpirun(signal.SIGTERM)

    def _signal_ranks(self, number: int) -> None:
        """Signal the ranks of this host and their child processes; mpirun reaches the others."""
        for rank in self.verdict.here:
            if self.verdict.codes.get(rank) != 0:
                _signal_group(self.verdict.shells[rank], number)

    def _signal_mpirun(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
        """Read what is left, and wait for mpirun; returns its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=LOOK_SECONDS)
        if process.poll() is None:
            process.kill()
            process.wait()
        while self._read(0.0):
            pass
        self.verdict.closed |= self.verdict.trouble  # who is missing now was ended by mpirun
        for rank in self.verdict.running:
            self.verdict.lose(rank)
        self.output.finish()
        return process.returncode

    def _outcome(self, mpirun_code: int) -> Outcome:
        number = self.signals.received
        if number is not None:
            return Outcome(128 + number, f"ended by {signal.Signals(number).name}", signal=number)
        failure = self.verdict.failure()
        if self.timed_out:
            return Outcome(NOT_STARTED_CODE, self._timeout_sentence())
        if failure is not None:
            return Outcome(failure.code, f"{failure}; the job has been ended", failure)
        if mpirun_code:
            code = mpirun_code if mpirun_code > 0 else 128 - mpirun_code
            return Outcome(code, f"{self.mpi.name} ended with exit code {code}: see what it says "
                                 "above (--verbose prints its command line)")  # fmt: skip
        if len(self.verdict.shells) < self.options.num_proc:
            return Outcome(NOT_STARTED_CODE, f"{self.mpi.name} ended before {self._missing()} "
                                             "had started")  # fmt: skip
        return Outcome()

    def _timeout_sentence(self) -> str:
        seconds = f"{self.options.start_timeout_seconds:g} seconds"
        return (
            f"{self._missing()} had not started after {seconds} (--start-timeout): "
            "check that the hosts can be reached by ssh and have free slots"
        )

    def _missing(self) -> str:
        missing = [r for r in range(self.options.num_proc) if r not in self.verdict.shells]
        return f"{len(missing)} of {self.options.num_proc} ranks ({_shorten(missing)})"

    def _clean_up(self) -> None:
        if self.verdict.closed or self.verdict.trouble:
            self._signal_ranks(signal.SIGKILL)  # child processes that outlived their rank
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process is not None and self.ending is not None:
            kill_session(self.process.pid)  # such as an ssh that found no host
        self.channels.close()
        self.output.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def _shorten(ranks: list[int]) -> str:
    text = ", ".join(map(str, ranks[:6]))
    return text if len(ranks) <= 6 else f"{text} and {len(ranks) - 6} more"


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _signal_group(shell: int, number: int) -> None:
    """Signal a rank's shell and what it started: each mpirun gives a rank a group of its own."""
    if shell != os.getpgrp():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(shell, number)


def _discard_output() -> None:
    """From here on, what we print goes nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    os.close(null)
