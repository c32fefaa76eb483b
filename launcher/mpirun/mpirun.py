"""A job whose ranks mpirun or srun runs, with a shell around each rank that connects it with us."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from hvdlite.launcher.command_line.debug_rank import redirections
from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.hosts.ssh import diagnose
from hvdlite.launcher.jobs.job import FixedJob
from hvdlite.launcher.jobs.outcome import JobOutcome
from hvdlite.launcher.jobs.passed_variables import home_directory, names_for_other_hosts
from hvdlite.launcher.mpirun.commands import Place, build_command
from hvdlite.launcher.mpirun.mpi import (
    MAPPING_FLAGS,
    OPENMPI,
    SLURM,
    Mpi,
    binds_ranks,
    flags_in,
    parameter_given,
)
from hvdlite.launcher.mpirun.pipes import Pipes
from hvdlite.launcher.mpirun.rank_shell import RankShell
from hvdlite.launcher.processes import rank_orders
from hvdlite.launcher.processes.child import Child
from hvdlite.launcher.processes.signals import signal_group

SHARED_MEMORY = Path("/dev/shm")
# The parameters of Open MPI that say where the files of its shared memory lie.
BACKING = ("btl_sm_backing_directory", "osc_sm_backing_directory", "osc_rdma_backing_directory")
BACKING_4 = ("btl_vader_backing_directory", *BACKING[1:])

# Removes the folders when this process has gone without doing so; an mpirun that outlives it for a
# moment may put something there once more.
PATH = "/usr/local/bin:/usr/bin:/bin"
REMOVE = """
cat
for second in 1 2 3 4 5; do sleep 1; rm -rf -- "$@"; done
"""


class Folders:
    """Private folders of one job, which nobody else may enter. What lies there is the job's own."""

    def __init__(self) -> None:
        prefix = f"hvdlite-run-{os.getpid()}-"
        self.temporary = tempfile.mkdtemp(prefix=prefix)
        self.shared_memory: str | None = None  # in memory, where this system has such a place
        if SHARED_MEMORY.is_dir():
            with contextlib.suppress(OSError):
                self.shared_memory = tempfile.mkdtemp(prefix=prefix, dir=SHARED_MEMORY)
        folders = filter(None, (self.temporary, self.shared_memory))
        self._remover = subprocess.Popen(
            ["/bin/sh", "-c", REMOVE, "sh", *folders], stdin=subprocess.PIPE, env={"PATH": PATH},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", start_new_session=True,
        )  # fmt: skip

    def backing_variables(
        self, mpi: Mpi, environ: Mapping[str, str], arguments: Sequence[str]
    ) -> dict[str, str]:
        """Return the variables by which Open MPI puts its shared memory into our folder.

        They are for the ranks of this host, and leave out what the user has set. Ranks that are
        killed leave their files behind, and in a folder of our own we know whose they are.
        """
        if self.shared_memory is None or OPENMPI not in (mpi.kind, mpi.library):
            return {}
        return {
            f"OMPI_MCA_{name}": self.shared_memory
            for name in (BACKING_4 if mpi.major == 4 else BACKING)
            if not parameter_given(name, environ, arguments, mpi.program)
        }

    def remove(self) -> None:
        for folder in (self.temporary, self.shared_memory):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        self._remover.kill()
        self._remover.communicate()


ALLOCATIONS = ("PBS_NODEFILE", "LSB_MCPU_HOSTS", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE",
               "SLURM_JOB_ID", "PRTE_MCA_prte_default_hostfile")  # fmt: skip
LAST_SECONDS = 1.0  # How long an mpirun that has closed its output may take to end.


class MpirunJob(FixedJob):
    """See `FixedJob`."""

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str], mpi: Mpi) -> None:
        super().__init__(options, environ)
        self.mpi = mpi
        self.name = mpi.name
        self.folders = Folders()
        # Open MPI's session directory lies in ours, and goes with it.
        self.environ = {
            **environ,
            "PRTE_MCA_prte_local_tmpdir_base": self.folders.temporary,
            # Open MPI does not start without a home.
            "HOME": home_directory(environ) or self.folders.temporary,
        }
        self._names = names_for_other_hosts(environ)
        self.token = f"hvdlite-rank-{secrets.token_hex(8)}"
        self.pipes = Pipes(self.folders.temporary, self.token, mpi.kind, self)
        self.process: Child | None = None
        self._ended = False
        self._segments: set[bytes] = set()  # shared memory that our ranks were seen to map

    def describe(self) -> list[str]:
        words = ["<rank shell>" if "\n" in word else word for word in self.command_line()]
        return [shlex.join(words)]

    def command_line(self) -> list[str]:
        """Return the whole command that starts the job."""
        options = self.options
        arguments = (*options.mpi_args, *options.binding_args)
        # Without hosts, mpirun uses those of an allocation that it knows of.
        allocated = not options.hosts and any(name in self.environ for name in ALLOCATIONS)
        placed = bool(flags_in(arguments) & MAPPING_FLAGS)  # They say which rank runs where.
        known = self.mpi.kind != SLURM and not allocated and not placed
        most_local_ranks = max(options.counts)
        nodes = self.environ.get("SLURM_NNODES", "")
        if self.mpi.kind == SLURM and nodes.isdecimal() and int(nodes):
            most_local_ranks = -(-options.num_proc // int(nodes))
        shell = RankShell(
            token=self.token,
            kind=self.mpi.kind,
            directory=self.folders.temporary,
            ranks=options.num_proc,
            counts=options.counts if known else (),
            most_local_ranks=most_local_ranks,
            bound=binds_ranks(arguments),
            prefixes=("HVDLITE", "HOROVOD") if options.as_horovod else ("HVDLITE",),
            torchrun=options.torchrun_env,
            here=self.folders.backing_variables(self.mpi, self.environ, options.mpi_args),
            debug_rank=options.debug_rank,
            debug_redirect=redirections() if options.debug_rank is not None else "",
        )
        place = Place(root=os.geteuid() == 0, names=self._names, token=self.token)
        return build_command(self.mpi, options, place, shell.wrap(options.command))

    def start(self) -> None:
        if self.options.verbose:
            self.pipes.print_early()
        self.pipes.make(self.options.num_proc)
        on_death = signal.SIGTERM if self.mpi.kind == OPENMPI else signal.SIGKILL
        self.process = Child(
            self.command_line(), self.environ, self.loop, self.pipes.read_mpirun,
            death_signal=on_death,
        )  # fmt: skip

    # -- while it runs

    def running(self) -> bool:
        assert self.process is not None
        return self.process.prints and self.process.code is None

    def look(self, now: float) -> None:
        heard = self.first_failure
        here = [rank for rank in heard.running if rank in heard.here]
        gone = [rank for rank in here if not _exists(heard.started[rank])]
        self.loop.run_once(0.0)  # a shell's last word comes before its end
        for rank in gone:
            if rank in heard.running:
                heard.lose(rank)

    def order(self, number: int, line: str) -> str:
        heard = self.first_failure
        if number in heard.here:
            rank_orders.give(self.folders.temporary, number, line)
            return ""
        here = next((rank for rank in heard.running if rank in heard.here), None)
        if here is None:
            return f"rank {number} is on another host: a rank on this one would have to ask it"
        try:
            rank_orders.pass_on(self.folders.temporary, here, number, line)
        except ValueError as error:  # It is longer by what says to whom it goes.
            return str(error)
        return ""

    def let_count(self) -> None:
        rank_orders.count(self.folders.temporary, passes=True)

    # -- the end

    def begin_end(self) -> None:
        self._ended = True
        self._note_segments()
        self.pipes.hush = True

    def signal(self, number: int) -> None:
        self._note_segments()
        self._signal_ranks(number)
        if self.options.remote or not self.all_started:
            self._signal_mpirun(signal.SIGTERM)

    def abandon(self) -> None:
        self._signal_mpirun(signal.SIGKILL)

    def _note_segments(self) -> None:
        """Note the shared memory of the ranks that are left, before we end them."""
        heard = self.first_failure
        self._segments |= segments_of({heard.started[rank] for rank in heard.here})

    def _signal_ranks(self, number: int) -> None:
        """Signal the ranks of this host and their child processes; mpirun reaches the others."""
        heard = self.first_failure
        for rank in heard.here:
            shell, code = heard.started[rank], heard.codes.get(rank)
            # Each mpirun gives a rank's shell, and what it starts, a group of its own. A process
            # that has the number of a shell that has ended is another one.
            ours = code is None or (code and not _exists(shell))
            if ours and shell != os.getpgrp():
                signal_group(shell, number)

    def _signal_mpirun(self, number: int) -> None:
        if self.process is not None:
            self.process.signal(number)

    def finish(self) -> None:
        assert self.process is not None
        self.process.wait(LAST_SECONDS)
        self.process.kill()
        while self.loop.run_once(0.0):
            pass
        if self.options.verbose or diagnose(self._said_early()) is None:
            with contextlib.suppress(BrokenPipeError):
                self.pipes.print_early()

    def failure(self) -> JobOutcome | None:
        code = self.process.code if self.process is not None else None
        if not code:
            return None
        code = code if code > 0 else 128 - code
        sentence = diagnose(self._said_early()) or (
            f"{self.name} ended with exit code {code}: see what it says above "
            "(--verbose prints its command line)"
        )
        return JobOutcome(code, sentence)

    def _said_early(self) -> list[str]:
        return [line.decode(errors="replace") for line in self.pipes.said_early or ()]

    def close(self) -> None:
        heard = self.first_failure
        if heard.closed or heard.trouble or self.ending is not None:
            self._signal_ranks(signal.SIGKILL)  # child processes that outlived their rank
        if self.process is not None and self._ended:
            kill_session(self.process.pid)  # such as an ssh that found no host
        if self.process is not None:
            self.process.close()
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


# What an MPI leaves behind when it is killed: processes and shared memory.
#
# Nothing is removed that may belong to another job: two containers can share ``/dev/shm`` and a
# user id, and then neither sees the processes of the other. So a segment counts as this job's only
# if one of its own ranks has been seen to map it.


MPI_SEGMENTS = re.compile(rb"/(sm_segment\.|vader_segment\.|osc_|mpich_shm_|Intel_MPI_)[^/]*$")


def kill_session(session: int) -> None:
    """Kill the processes of a session."""
    for process in _processes():
        with contextlib.suppress(OSError):
            if os.getsid(process) == session:
                os.kill(process, signal.SIGKILL)


def segments_of(groups: Collection[int]) -> set[bytes]:
    """Return the MPI segments that the processes of these process groups map."""
    found: set[bytes] = set()
    for process in _processes():
        with contextlib.suppress(OSError):
            if os.getpgid(process) in groups:
                with open(f"/proc/{process}/maps", "rb") as maps:
                    found.update(_segments(maps))
    return found


def _segments(maps: Iterable[bytes]) -> Iterable[bytes]:
    """Yield the paths of MPI segments in lines of ``/proc/PID/maps``."""
    for line in maps:
        path = line.split(maxsplit=5)[5:]
        if path and path[0].startswith(b"/dev/shm/") and MPI_SEGMENTS.search(path[0].rstrip()):
            yield path[0].rstrip()


def remove_segments(paths: Iterable[bytes]) -> None:
    """Remove segments; those that are gone already do no harm."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []
