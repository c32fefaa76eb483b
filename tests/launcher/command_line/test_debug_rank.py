"""--debug-rank: a debugger works in one rank, on a real terminal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.forks import NUMPY
from tests.launcher.jobs import LAUNCHER, launch
from tests.launcher.top.terminal import terminal

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


@pytest.mark.usefixtures("launcher")
def test_breakpoint_works_in_one_rank(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = [*LAUNCHER, "-np", "2", "--debug-rank", "1", sys.executable, str(script)]
    with terminal(words, forked=NUMPY) as screen:
        screen.wait_for(r"\(Pdb\) ")
        screen.press("p secret + 1000\n")
        screen.wait_for(r"1043\s+\(Pdb\) ")
        screen.press("c\n")
        assert screen.wait() == 0
    lines = screen.text.replace("\r", "").splitlines()
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
    words = [*LAUNCHER, "-np", "1", sys.executable, "-c", script]
    with terminal(words, forked=NUMPY) as screen:
        assert screen.wait() == 0
    assert "\r\x1b[K[0]<stderr>:1/3" in screen.text
    assert screen.text.endswith("\r\x1b[K[0]<stderr>:3/3\r\n")
