"""Runs ranks by mpirun or srun, with a shell around each rank that connects it with us."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess

from hvdlite.launcher.cleanup import kill_session, remove_segments, segments_of
from hvdlite.launcher.commands import Place, build_command
from hvdlite.launcher.debug import redirections
from hvdlite.launcher.environment import is_root, most_local_ranks
from hvdlite.launcher.folders import Folders
from hvdlite.launcher.mpi import OPENMPI, SLURM, Mpi
from hvdlite.launcher.mpi_arguments import binds_ranks, places_ranks
from hvdlite.launcher.output import STREAMS
from hvdlite.launcher.passed_variables import home_directory, names_for_other_hosts
from hvdlite.launcher.pipes import Pipes
from hvdlite.launcher.rank_shell import RankShell
from hvdlite.launcher.runner import JobContext, StartFailure
from hvdlite.launcher.signals import die_with_parent
from hvdlite.launcher.unreachable import diagnose

ALLOCATIONS = ("PBS_NODEFILE", "LSB_MCPU_HOSTS", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE",
               "SLURM_JOB_ID", "PRTE_MCA_prte_default_hostfile")  # fmt: skip
LAST_SECONDS = 1.0  # How long an mpirun that has closed its output may take to end.


class Mpirun:
    """See `Runner`."""

    def __init__(self, mpi: Mpi, job: JobContext) -> None:
        self.mpi = mpi
        self.name = mpi.name
        self.job = job
        self.options = job.options
        self.folders = Folders()
        # Open MPI's session directory lies in ours, and goes with it.
        self.environ = {**job.environ, "PRTE_MCA_prte_local_tmpdir_base": self.folders.temporary}
        self._names = names_for_other_hosts(job.environ)
        # Open MPI does not start without a home.
        self.environ["HOME"] = home_directory(job.environ) or self.folders.temporary
        self.token = f"hvdlite-rank-{secrets.token_hex(8)}"
        self.pipes = Pipes(self.folders.temporary, self.token, mpi.kind, job)
        self.process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._segments: set[bytes] = set()  # shared memory that our ranks were seen to map

    def describe(self) -> list[str]:
        """See `Runner`."""
        import shlex

        words = ["<rank shell>" if "\n" in word else word for word in self.command_line()]
        return [shlex.join(words)]

    def command_line(self) -> list[str]:
        """Return the whole command that starts the job."""
        place = Place(root=is_root(), names=self._names, token=self.token)
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

    def start(self) -> None:
        """See `Runner`."""
        if self.options.verbose:
            self.pipes.print_early()
        self.pipes.make(self.options.num_proc)
        on_death = signal.SIGTERM if self.mpi.kind == OPENMPI else signal.SIGKILL
        self.process = subprocess.Popen(
            self.command_line(),
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C comes to us alone; we end the job in order
            preexec_fn=die_with_parent(on_death),  # noqa: PLW1509 - it makes one system call
        )
        for stream, pipe in zip(STREAMS, (self.process.stdout, self.process.stderr), strict=True):
            assert pipe is not None
            self.pipes.listen_to_mpirun(stream, pipe)

    # -- while it runs

    def running(self) -> bool:
        """See `Runner`."""
        assert self.process is not None
        return bool(self.pipes.mpirun_streams) and self.process.poll() is None

    def look(self) -> None:
        """See `Runner`."""
        heard = self.job.first_failure
        here = [rank for rank in heard.running if rank in heard.here]
        gone = [rank for rank in here if not _exists(heard.started[rank])]
        self.job.loop.run_once(0.0)  # a shell's last word comes before its end
        for rank in gone:
            if rank in heard.running:
                heard.lose(rank)

    def keep_alive(self) -> None:
        """See `Runner`."""

    # -- the end

    def begin_end(self) -> None:
        """See `Runner`."""
        self._ended = True
        self._note_segments()
        self.pipes.hush = True

    def signal(self, number: int) -> None:
        """See `Runner`."""
        self._note_segments()
        self._signal_ranks(number)
        if self.options.remote or not self.job.all_started:
            self._signal_mpirun(signal.SIGTERM)

    def abandon(self) -> None:
        """See `Runner`."""
        self._signal_mpirun(signal.SIGKILL)

    def _note_segments(self) -> None:
        """Note the shared memory of the ranks that are left, before we end them."""
        heard = self.job.first_failure
        self._segments |= segments_of({heard.started[rank] for rank in heard.here})

    def _signal_ranks(self, number: int) -> None:
        """Signal the ranks of this host and their child processes; mpirun reaches the others."""
        heard = self.job.first_failure
        for rank in heard.here:
            if heard.codes.get(rank) != 0:
                _signal_group(heard.started[rank], number)

    def _signal_mpirun(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def finish(self) -> None:
        """See `Runner`."""
        process = self.process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=LAST_SECONDS)
        if process.poll() is None:
            process.kill()
            process.wait()
        while self.job.loop.run_once(0.0):
            pass
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
        if self.options.verbose or diagnose(self._said_early()) is None:
            with contextlib.suppress(BrokenPipeError):
                self.pipes.print_early()

    def late(self, missing: list[int]) -> list[int]:
        """See `Runner`."""
        return missing

    def failure(self) -> StartFailure | None:
        """See `Runner`."""
        code = self.process.poll() if self.process is not None else None
        if not code:
            return None
        code = code if code > 0 else 128 - code
        sentence = diagnose(self._said_early()) or (
            f"{self.name} ended with exit code {code}: see what it says above "
            "(--verbose prints its command line)"
        )
        return StartFailure(code, sentence)

    def _said_early(self) -> list[str]:
        return [line.decode(errors="replace") for line in self.pipes.said_early or ()]

    def close(self, kill: bool) -> None:
        """See `Runner`."""
        if kill:
            self._signal_ranks(signal.SIGKILL)  # child processes that outlived their rank
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process is not None and self._ended:
            kill_session(self.process.pid)  # such as an ssh that found no host
        remove_segments(self._segments)
        self.pipes.close()
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
