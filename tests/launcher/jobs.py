"""Runs hvdlite-run for the tests, and looks for what a job must not leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from tests.forks import NUMPY, forks, set_signals
from tests.limits import patient
from tests.parallel.jobs import environment

LAUNCHER = [sys.executable, "-m", "hvdlite.launcher"]
IMPATIENT = [sys.executable, "-m", "tests.launcher.impatient"]  # Needs the checkout in its path.
# What the scripts of the tests start with.
RANK = """
import os, sys, time
rank = int(os.environ["HVDLITE_RANK"])
"""
SHARED_MEMORY = Path("/dev/shm")
MARK = "HVDLITE_TEST_JOB"  # a variable that every process of a job inherits


@contextmanager
def start(
    *words: str,
    ignored: Collection[int] = (),
    may_leave: str = "",
    program: Sequence[str] = LAUNCHER,
    forked: Sequence[str] = NUMPY,
    **variables: str,
) -> Iterator[subprocess.Popen[str]]:
    """Start hvdlite-run with these signals ignored; at the end, nothing of the job may be left.

    `may_leave` is a pattern of files that a killed process of another host cannot remove. All
    Python is forked from processes that have the modules `forked`, unless there are none.
    """
    before = set(SHARED_MEMORY.iterdir())  # A process that was killed long ago had the same number.
    with tempfile.TemporaryDirectory() as folder:
        # Temporary files of the launcher and of MPI go where we can look for them.
        variables = {MARK: folder, "TMPDIR": folder, **variables}
        popen = forks(*forked) if forked else subprocess.Popen
        process = popen(
            [*program, *words],
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=partial(set_signals, ignored),
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()
            left = processes(variables[MARK])
            for number in left:
                os.kill(number, signal.SIGKILL)
        assert left == {}
        assert set(SHARED_MEMORY.glob(f"hvdlite-run-{process.pid}-*")) <= before
        left_files = [name for name in os.listdir(folder) if not fnmatch(name, may_leave)]
        assert left_files == [], left_files


def launch(
    *words: str,
    timeout: float = 60,
    program: Sequence[str] = LAUNCHER,
    forked: Sequence[str] = NUMPY,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run hvdlite-run to its end; `forked` as for `start`."""
    with start(*words, program=program, forked=forked, **variables) as process:
        out, err = process.communicate(timeout=patient(timeout))
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def processes(mark: str) -> dict[int, str]:
    """The processes that belong to the job with this mark, with their command lines."""
    found = {}
    wanted = f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (path / "environ").read_bytes().split(b"\0"):
                found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended, or is not ours
            continue
    return found


def executable(path: Path, text: str) -> Path:
    """Write a program of the shell; return its path."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def wait_until_up(process: subprocess.Popen[str], ranks: int) -> None:
    """Wait until so many ranks have said that they are up."""
    assert process.stdout is not None and process.stderr is not None
    for _ in range(ranks):
        assert process.stdout.readline().endswith(":up\n"), process.stderr.read()
