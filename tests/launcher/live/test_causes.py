"""Why a rank is slow, told of a real job whose last rank has reason after reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import TORCH
from tests.launcher.jobs import start
from tests.launcher.live.following import Followed

MS = r"[\d.]+ m?s"
SLOWER = rf"its compute takes {MS}, theirs {MS}"
WAITS = rf"rank 2 \(host \S+\) makes the others wait {MS} a step \(.*\)"
# What rank 2 suffers from, and how the sentence about it ends.
REASONS = {
    "data": rf"its data takes {MS}, theirs {MS}",
    "batches": rf"{SLOWER}; its batches have 48 rows, theirs 16",
    "compute": SLOWER,
    "core": rf"{SLOWER}; its main thread waits {MS} longer for a core.*",
    "garbage": rf"{SLOWER}; Python's garbage collection takes {MS} of it",
    "swap": rf"{SLOWER}; \d+ pages a second are read from disk: its host is short of memory, or .*",
    "clock": rf"{SLOWER}; its core runs at \d+% of the speed of theirs",
}


def in_memory(folder: Path) -> bool:
    """Whether files of a folder have no disk from which they could be read again."""
    words = ["stat", "-f", "-c", "%T", str(folder)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout == "tmpfs\n"


@pytest.mark.timeout(150)
def test_causes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "reason"
    file.write_text("")
    program = [sys.executable, "-m", "tests.launcher.live.hasty"]
    training = [sys.executable, "-m", "tests.launcher.live.slowed_training", str(file)]
    words = ("-np", "3", "--metrics-port", "0", *training)
    with start(*words, may_leave="torch*", program=program, forked=TORCH) as process:
        job = Followed(process, file)
        for reason, text in REASONS.items():
            if reason != "swap" or not in_memory(tmp_path):
                job.slow_down(reason)
                job.must_say(
                    rf"rank 2 \(host \S+\) makes the others wait {MS} a step \(.*\): {text}"
                )
        job.slow_down("end")
        assert process.wait(30) == 0
