"""Agents over real ssh: cut cables, killed processes and broken hosts, each in one sentence."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from tests.hosts import faults
from tests.hosts.jobs import ALL, FOREVER, SUM, hvdlite_run, in_the_middle
from tests.hosts.lab import Lab

pytestmark = pytest.mark.timeout(240)
AGENTS = ("--launcher", "ssh", "--no-check-hosts", "-np", "3", "-H", ALL)
SHORT = "2"  # HVDLITE_PEER_TIMEOUT


def test_ranks_of_three_hosts(lab: Lab) -> None:
    done = hvdlite_run(lab, *AGENTS, "python", "-c", SUM)
    lines = sorted(line.partition(":sum ")[2] for line in done.stdout.splitlines())
    assert (done.returncode, done.stderr) == (0, "")
    assert lines == [f"{rank} node{'abc'[rank]} 6.0 6.0 6.0 6.0" for rank in range(3)]


def test_a_function_needs_no_shared_directory(lab: Lab) -> None:
    script = (
        "import hvdlite, os\n"
        "def f(data):\n"
        "    return os.environ['HVDLITE_RANK'], os.uname().nodename, len(data)\n"
        f"print(hvdlite.run(f, (b'x' * 3_000_000,), hosts='{ALL}', launcher='ssh'))\n"
    )
    done = lab.run("nodea", "python", "-c", script)
    assert done.stdout.strip() == str([(str(r), f"node{'abc'[r]}", 3_000_000) for r in range(3)])


def test_a_cable_that_is_cut_is_noticed_on_both_sides(lab: Lab) -> None:
    command = (*AGENTS, "python", "-c", FOREVER)
    with (
        in_the_middle(lab, *command, HVDLITE_PEER_TIMEOUT=SHORT) as job,
        faults.cut(lab, "nodeb"),
    ):
        begin = time.monotonic()
        done = job.finish(timeout=30)
        assert time.monotonic() - begin < 28
        assert "nodeb" in done.stderr.splitlines()[-1], done.stderr
        assert wait_for_none(lab, "nodeb")
    assert done.returncode != 0


def wait_for_none(lab: Lab, host: str, seconds: float = 10.0) -> bool:
    """Return whether no rank and no agent is left in `host`."""
    deadline = time.monotonic() + seconds
    while any("hvdlite" in line for line in lab.processes(host).values()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_a_killed_launcher_leaves_nothing_on_any_host(lab: Lab) -> None:
    with in_the_middle(lab, *AGENTS, "python", "-c", FOREVER) as job:
        job.signal(signal.SIGKILL)
        assert all(wait_for_none(lab, host, 20.0) for host in ("nodea", "nodeb", "nodec"))
        with contextlib.suppress(Exception):
            job.finish(timeout=5)


def test_an_agent_that_is_killed_is_told_with_its_host(lab: Lab) -> None:
    with in_the_middle(lab, *AGENTS, "python", "-c", FOREVER) as job:
        (agent,) = [
            number for number, line in lab.processes("nodec").items()
            if "launcher.agent_process" in line and "env " not in line and "cd /" not in line
        ]  # fmt: skip
        os.kill(agent, signal.SIGKILL)
        done = job.finish(timeout=20)
        assert "rank 2" in done.stderr.splitlines()[-1]
        assert wait_for_none(lab, "nodec")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda lab: faults.no_key(lab, "nodeb"), "ssh-copy-id nodeb"),
        (lambda lab: faults.no_environment(lab, "nodeb"), "no Python"),
        (lambda lab: faults.unreachable(lab, "nodeb"), "nodeb cannot be used: the network"),
        (lambda lab: faults.hanging_login(lab, "nodeb"), "on nodeb had not started after 4 sec"),
    ],
    ids=["no key", "no environment", "unreachable", "hanging login"],
)
def test_a_broken_host_is_one_sentence(lab: Lab, fault, said: str) -> None:  # type: ignore[no-untyped-def]
    with fault(lab):
        begin = time.monotonic()
        done = hvdlite_run(lab, "--start-timeout", "4", *AGENTS, "true")
        assert time.monotonic() - begin < 28
    assert done.returncode == 1
    assert done.stderr.startswith("hvdlite-run: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
