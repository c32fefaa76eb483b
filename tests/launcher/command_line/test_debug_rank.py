"""--debug-rank: a debugger works in one rank, on a real terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launcher.jobs import LAUNCHER, launch
from tests.parallel.jobs import environment

SECONDS = 40

SCRIPT = """
import os, sys
import numpy as np
import hvdlite.numpy as hvd
hvd.init()
secret = 6 * 7 + hvd.rank()
breakpoint()
total = hvd.allreduce(np.ones(1), op=hvd.Sum)
# In one piece: all ranks write to the terminal at once.
sys.stdout.write(f"rank {hvd.rank()} sum {total[0]} {sys.stdin.isatty()}\\n")
sys.stdout.flush()
"""


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, command: list[str], environ: dict[str, str]) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(command[0], command, environ)
        self.seen = ""

    def read_until(self, pattern: str) -> None:
        """Read until `pattern` has come since the last call."""
        deadline = time.monotonic() + SECONDS
        start = len(self.seen)
        while not re.search(pattern, self.seen[start:]):
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self.fd], [], [], max(0, left))
            assert ready, f"{pattern} did not come in {SECONDS} s: {self.seen}"
            try:
                self.seen += os.read(self.fd, 4096).decode()
            except OSError:  # the other side is closed
                raise AssertionError(f"{pattern} did not come: {self.seen}") from None

    def type(self, line: str) -> None:
        os.write(self.fd, f"{line}\n".encode())

    def wait(self) -> int:
        """Read to the end; returns the exit code."""
        while True:
            try:
                data = os.read(self.fd, 4096)
            except OSError:
                break
            if not data:
                break
            self.seen += data.decode()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    process = Terminal([*LAUNCHER, *words], environment())
    try:
        yield process
    finally:
        os.close(process.fd)  # a hangup ends what is left


@pytest.mark.usefixtures("launcher")
def test_breakpoint_works_in_one_rank(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with terminal("-np", "2", "--debug-rank", "1", sys.executable, str(script)) as process:
        process.read_until(r"\(Pdb\) ")
        process.type("p secret + 1000")
        process.read_until(r"1043\s+\(Pdb\) ")
        process.type("c")
        assert process.wait() == 0
    lines = process.seen.replace("\r", "").splitlines()
    assert "rank 1 sum 2.0 True" in lines  # as it is, and from a terminal
    assert "[0]<stdout>:rank 0 sum 2.0 False" in lines


def test_a_debugger_may_be_fed_from_a_file() -> None:
    script = "import sys; print(repr(sys.stdin.read()), end='', flush=True)"
    done = launch("-np", "2", "--debug-rank", "0", sys.executable, "-c", script)
    assert sorted(done.stdout.replace("''", "'' ").split()) == ["''", "[1]<stdout>:''"]
    assert done.returncode == 0


def test_a_bar_moves_on_a_terminal_and_leaves_one_line() -> None:
    script = (
        "import sys, time\n"
        "for n in range(4): sys.stderr.write(f'\\r{n}/3'); sys.stderr.flush(); time.sleep(0.2)\n"
        "print(file=sys.stderr)"
    )
    with terminal("-np", "1", sys.executable, "-c", script) as process:
        assert process.wait() == 0
    assert "\r\x1b[K[0]<stderr>:1/3" in process.seen
    assert process.seen.endswith("\r\x1b[K[0]<stderr>:3/3\r\n")
