"""Servers and workers on three hosts: by the launcher and by hand, a cut cable, killed ones."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.hosts import faults
from tests.hosts.jobs import ALL, LAUNCHER, hvdlite_run
from tests.hosts.lab import HOSTS, ROOT, SHARED, Lab, Running, address

pytestmark = pytest.mark.timeout(240)
SUMS = (sys.executable, "-m", "tests.ps.scripts.raw_sums", str(SHARED))
STEPS = 20
PYTHONPATH = str(ROOT)


def total(steps: int, workers: int) -> str:
    """Return what a worker prints after so many steps."""
    return f"sums {steps * sum(range(1, workers + 1)):.1f} {steps * workers:.1f}"


def test_a_job_with_servers_on_three_hosts(lab: Lab) -> None:
    flags = "--launcher", "ssh", "--no-check-hosts", "-np", "3", "-H", ALL, "--ps-servers", "3"
    done = hvdlite_run(lab, *flags, *SUMS, str(STEPS), PYTHONPATH=PYTHONPATH)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(total(STEPS, 3)) == 3, done.stdout
    for number in range(3):
        assert f"server {number} is here" in done.stdout


def test_ctrl_c_leaves_nothing_on_three_hosts(lab: Lab) -> None:
    """No process and no file, as `lab` sees to, and so no port."""
    flags = "--launcher", "ssh", "--no-check-hosts", "-np", "3", "-H", ALL, "--ps-servers", "3"
    words = *flags, *SUMS, "100000000"
    with lab.start("nodea", *LAUNCHER, *words, PYTHONPATH=PYTHONPATH) as running:
        assert running.process.stdout is not None
        lines = [running.process.stdout.readline() for _ in range(6)]
        assert sum("is here" in line for line in lines) == 6, lines
        running.signal(signal.SIGINT)
        assert running.finish(30).returncode == 128 + signal.SIGINT


def common_words(**words: str) -> dict[str, str]:
    """Return the variables that all processes have alike."""
    return {
        "HVDLITE_SCHEDULER": f"{address('nodea')}:4242", "HVDLITE_NUM_SERVERS": "2",
        "HVDLITE_NUM_WORKERS": "3", "HVDLITE_PS_TOKEN": "a secret", "PYTHONPATH": PYTHONPATH,
        **words,
    }  # fmt: skip


def roles(lab: Lab, stack: contextlib.ExitStack, steps: int, **words: str) -> dict[str, Running]:
    """Start a scheduler and a server on nodea, a server on nodeb, and a worker on each host."""
    common = common_words(**words)
    places = [("scheduler", 0), ("server", 0), ("server", 1), *(("worker", n) for n in range(3))]
    running = {}
    for role, number in places:
        running[f"{role}{number}"] = start(lab, stack, steps, role, number, **common)
    return running


def start(
    lab: Lab, stack: contextlib.ExitStack, steps: int, role: str, number: int, **words: str
) -> Running:
    """Start one process, perhaps again, on its host."""
    own = {
        "HVDLITE_ROLE": role, "HVDLITE_NODE_ID": f"{role}{number}",
        "HVDLITE_NODE_NUMBER": str(number),
    }  # fmt: skip
    job = lab.start(HOSTS[number], *SUMS, str(steps), **words, **own)
    return stack.enter_context(job)


def end(running: dict[str, Running], steps: int) -> None:
    """Let all processes end well; each worker has the sums of all."""
    for name, each in running.items():
        done = each.finish(60)
        assert done.returncode == 0, (name, done.stderr)
        assert not name.startswith("worker") or total(steps, 3) in done.stdout


@pytest.mark.parametrize("seconds", [0.7, pytest.param(8.0, marks=pytest.mark.soak)])
def test_a_cable_that_is_cut_for_a_while_loses_nothing_and_applies_nothing_twice(
    lab: Lab, seconds: float
) -> None:
    """The host has a server and a worker, which take part in all steps."""
    reached = lab.folder / "shared" / "reached"
    with contextlib.ExitStack() as stack:
        running = roles(lab, stack, 500, SAY="50")
        wait_for(reached)
        with faults.cut(lab, "nodeb"):
            time.sleep(seconds)
            assert running["worker0"].process.poll() is None
        end(running, 500)


@pytest.mark.parametrize("name", ["server1", "worker2", "scheduler0"])
def test_a_process_that_is_killed_and_started_again_leaves_the_sums(lab: Lab, name: str) -> None:
    """Each version is saved, as is what the scheduler has to know again."""
    reached = lab.folder / "shared" / "reached"
    role, number = name[:-1], int(name[-1])
    words = {
        "HVDLITE_PS_SNAPSHOT": str(SHARED / f"saved-{name}"), "HVDLITE_PS_SNAPSHOT_EVERY": "1",
        "HVDLITE_PS_WORKERS": "independent", "SAY": "50",
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        running = roles(lab, stack, 200, **words)
        wait_for(reached)
        running[name].signal(signal.SIGKILL)
        assert running[name].finish(20).returncode != 0
        running[name] = start(lab, stack, 200, role, number, **common_words(**words))
        end(running, 200)


def wait_for(file: Path, seconds: float = 30.0) -> None:
    limit = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < limit, f"nobody makes {file}"
        time.sleep(0.01)
    file.unlink()
