"""Runs one job: starts mpirun, listens to the ranks, and ends all processes together."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping

from hvdlite.launcher import termination_plan as ending
from hvdlite.launcher.cleanup import kill_session, remove_segments, segments_of
from hvdlite.launcher.commands import Place, build_command
from hvdlite.launcher.console import Console
from hvdlite.launcher.debug import redirections
from hvdlite.launcher.environment import (
    home_directory,
    is_root,
    most_local_ranks,
    names_for_other_hosts,
)
from hvdlite.launcher.first_failure import FirstFailure
from hvdlite.launcher.folders import Folders
from hvdlite.launcher.mpi import OPENMPI, SLURM, Mpi
from hvdlite.launcher.mpi_arguments import binds_ranks, places_ranks
from hvdlite.launcher.options import LaunchOptions
from hvdlite.launcher.outcome import End, JobOutcome, conclude
from hvdlite.launcher.output import STREAMS, Output
from hvdlite.launcher.pipes import Channels
from hvdlite.launcher.rank_shell import RankShell
from hvdlite.launcher.signals import SignalInbox, die_with_parent
from hvdlite.launcher.termination_plan import Ending
from hvdlite.launcher.unreachable import diagnose

ALLOCATIONS = ("PBS_NODEFILE", "LSB_MCPU_HOSTS", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE",
               "SLURM_JOB_ID", "PRTE_MCA_prte_default_hostfile")  # fmt: skip
LOOK_SECONDS = 1.0  # how often we look whether a shell has gone without a word


class Job:
    """One run of one command on all ranks."""

    def __init__(self, mpi: Mpi, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        self.mpi = mpi
        self.options = options
        self.signals = SignalInbox()
        self.console = Console(give_up=lambda: self.signals.received is not None)
        self.output = Output(
            options.num_proc, options.output_filename, options.prefix_timestamp,
            self.console, options.debug_rank,
        )  # fmt: skip
        self.folders = Folders()
        # Open MPI's session directory lies in ours, and goes with it.
        self.environ = {**environ, "PRTE_MCA_prte_local_tmpdir_base": self.folders.temporary}
        self._names = names_for_other_hosts(environ)
        # Open MPI does not start without a home.
        self.environ["HOME"] = home_directory(environ) or self.folders.temporary
        self.token = f"hvdlite-rank-{secrets.token_hex(8)}"
        self.first_failure = FirstFailure()
        self.channels = Channels(
            self.folders.temporary, self.token, mpi.kind, self.first_failure, self.output
        )
        self.ending: Ending | None = None
        self.timed_out = False
        self.process: subprocess.Popen[bytes] | None = None
        self._segments: set[bytes] = set()  # shared memory that our ranks were seen to map

    def run(self) -> JobOutcome:
        """Run to the end. When this returns, no process and no file of the job is left."""
        try:
            with self.signals:
                process = self._start()
                self._watch(process)
                outcome = self._outcome(self._reap(process))
        finally:
            self._clean_up()
        return outcome

    def command_line(self) -> list[str]:
        """Return the whole command that starts the job."""
        place = Place(root=is_root(), names=self._names)
        rank_command = self._shell().wrap(self.options.command)
        return build_command(self.mpi, self.options, place, rank_command)

    def _shell(self) -> RankShell:
        options = self.options
        arguments = (*options.mpi_args, *options.binding_args)
        # Without hosts, mpirun uses those of an allocation that it knows of.
        allocated = not options.hosts and any(name in self.environ for name in ALLOCATIONS)
        known = self.mpi.kind != SLURM and not allocated and not places_ranks(arguments)
        debug = options.debug_rank is not None
        return RankShell(
            token=self.token,
            kind=self.mpi.kind,
            directory=self.folders.temporary,
            ranks=options.num_proc,
            counts=options.counts if known else (),
            most_local_ranks=most_local_ranks(self.environ, self.mpi, options),
            bound=binds_ranks(arguments),
            prefixes=("HVDLITE", "HOROVOD") if options.as_horovod else ("HVDLITE",),
            torchrun=options.torchrun_env,
            here=self.folders.backing_variables(self.mpi, self.environ, options.mpi_args),
            debug_rank=options.debug_rank,
            debug_redirect=redirections() if debug else "",
        )

    def _start(self) -> subprocess.Popen[bytes]:
        if self.options.verbose:
            self.channels.print_early()
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
            return True

    def _look_for_lost(self) -> None:
        here = [rank for rank in self.first_failure.running if rank in self.first_failure.here]
        gone = [rank for rank in here if not _exists(self.first_failure.shells[rank])]
        self._read(0.0)  # a shell's last word comes before its end
        for rank in gone:
            if rank in self.first_failure.running:
                self.first_failure.lose(rank)

    def _decide(self, now: float, too_late: bool) -> None:
        plan = self._plan(too_late)
        if plan is not None:
            self._note_segments()
            self.ending = Ending.begin(plan, now)
            self.channels.hush = True
        while self.ending and (step := self.ending.next_step(now)):
            self._take(step)

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
        if too_late and len(self.first_failure.shells) < self.options.num_proc:
            self.timed_out = True
            return ending.AFTER_SIGTERM
        return None

    # -- the end

    def _take(self, step: str) -> None:
        if step == ending.ABANDON:
            self._signal_mpirun(signal.SIGKILL)
            return
        self.first_failure.closed = True
        self._note_segments()
        number = ending.SIGNALS[step]
        self._signal_ranks(number)
        if self.options.remote or len(self.first_failure.shells) < self.options.num_proc:
            self._signal_mpirun(signal.SIGTERM)

    def _note_segments(self) -> None:
        """Note the shared memory of the ranks that are left, before we end them."""
        self._segments |= segments_of(
            {self.first_failure.shells[rank] for rank in self.first_failure.here}
        )

    def _signal_ranks(self, number: int) -> None:
        """Signal the ranks of this host and their child processes; mpirun reaches the others."""
        for rank in self.first_failure.here:
            if self.first_failure.codes.get(rank) != 0:
                _signal_group(self.first_failure.shells[rank], number)

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
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
        self.first_failure.closed |= (
            self.first_failure.trouble
        )  # who is missing now was ended by mpirun
        for rank in self.first_failure.running:
            self.first_failure.lose(rank)
        with contextlib.suppress(BrokenPipeError):
            self.output.finish()
            if self.options.verbose or diagnose(self._said_early()) is None:
                self.channels.print_early()
        return process.returncode

    def _said_early(self) -> list[str]:
        return [line.decode(errors="replace") for line in self.channels.said_early or ()]

    def _outcome(self, mpirun_code: int) -> JobOutcome:
        for rank, cause in self.output.causes().items():
            self.first_failure.causes.setdefault(rank, cause)
        end = End(
            mpi=self.mpi.name,
            mpi_code=mpirun_code,
            mpi_said=self._said_early(),
            signal=self.signals.received,
            timed_out=self.timed_out,
        )
        return conclude(end, self.first_failure, self.options)

    def _clean_up(self) -> None:
        if self.first_failure.closed or self.first_failure.trouble:
            self._signal_ranks(signal.SIGKILL)  # child processes that outlived their rank
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process is not None and self.ending is not None:
            kill_session(self.process.pid)  # such as an ssh that found no host
        remove_segments(self._segments)
        self.channels.close()
        self.output.close()
        self.folders.remove()


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
