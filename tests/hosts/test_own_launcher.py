"""Jobs on several hosts that our own agents start, over TCP: what works, and what may fail."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable

import pytest

from tests.hosts import faults
from tests.hosts.jobs import ALL, FOREVER, SUM, hvdlite_run, in_the_middle, sentences, sums
from tests.hosts.lab import Lab, Running, address
from tests.hosts.test_check_hosts import Fault

SSH = ("--launcher=ssh",)
PEER_SECONDS = 3


def job(lab: Lab, hosts: str, script: str = SUM, *words: str, **more: str) -> None:
    """Run a job, and check the sum over its ranks."""
    done = hvdlite_run(lab, *SSH, *words, "-H", hosts, sys.executable, "-c", script, **more)
    ranks = sum(int(host.partition(":")[2] or 1) for host in hosts.split(","))
    total = sum(range(1, ranks + 1))
    assert done.returncode == 0 and sums(done) == dict.fromkeys(range(ranks), float(total)), done


def test_nothing_is_said_where_all_is_well(lab: Lab) -> None:
    words = (*SSH, "--no-check-hosts", "-H", ALL, sys.executable, "-c", SUM)
    done = hvdlite_run(lab, *words)
    lines = sorted(line.partition(":sum ")[2] for line in done.stdout.splitlines())
    assert (done.returncode, done.stderr) == (0, "")
    assert lines == [f"{rank} node{'abc'[rank]} 6.0 6.0 6.0 6.0" for rank in range(3)]


@pytest.mark.parametrize(
    "named",
    [
        "nodea:1,nodeb:2,nodec:1",
        "nodeb:1,nodec:1",
        f"{address('nodea')}:1,{address('nodeb', 1)}:1",
        "nodeb.job.ns.svc:1,nodec.job.ns.svc:1",
        "localhost:1,nodeb:1",
    ],
)
def test_every_way_to_name_hosts(lab: Lab, named: str) -> None:
    job(lab, named)


@pytest.mark.parametrize("check", ["--check-hosts", "--no-check-hosts"])
def test_docker_on_two_hosts_disturbs_nobody(lab: Lab, check: str) -> None:
    with faults.docker(lab, "nodea", "nodeb"):
        job(lab, ALL, SUM, *([check] * (check[2:4] == "no")))


@pytest.mark.parametrize("check", [(), ("--no-check-hosts",)])
def test_a_network_card_that_leads_nowhere_disturbs_nobody(
    lab: Lab, check: tuple[str, ...]
) -> None:
    with faults.cut(lab, "nodeb", networks=[1]):
        job(lab, ALL, SUM, *check)


def test_two_hosts_of_one_name_are_two_hosts(lab: Lab) -> None:
    """Images of virtual machines often have one name; boot and network tell them apart."""
    script = SUM + 'print("local", hvd.local_size(), hvd.cross_size())'
    lab.run("nodeb", "hostname", "nodea")
    try:
        done = hvdlite_run(
            lab, *SSH, "-H", "nodea:1,nodeb:1", sys.executable, "-c", script, timeout=20
        )
        assert done.stdout.count(":local 1 2\n") == 2, done
    finally:
        lab.run("nodeb", "hostname", "nodeb")


def test_a_firewall_that_leaves_the_ports_of_the_user_open(lab: Lab) -> None:
    opened = (22, *range(12000, 12021))
    with (
        faults.firewall(lab, "nodea", ports=opened),
        faults.firewall(lab, "nodeb", ports=opened),
    ):
        job(lab, "nodea:1,nodeb:1", HVDLITE_TCP_PORTS="12000-12020")


# A fault of nodeb, and what the agents say of it where nobody has looked at the hosts before.
UNCHECKED: dict[str, tuple[Fault, str]] = {
    "unknown host key": (
        lambda lab: faults.unknown_host_key(lab, "nodea", "nodeb"), "its key is not known",
    ),
    "no key": (lambda lab: faults.no_key(lab, "nodeb"), "refuses the login.*ssh-copy-id nodeb"),
    "no environment": (lambda lab: faults.no_environment(lab, "nodeb"), "there is no Python at"),
    "dropped packets": (lambda lab: faults.unreachable(lab, "nodeb"), "does not lead to it|answer"),
    "a silent sshd": (lambda lab: faults.frozen(lab, "nodeb"), "does not answer|nodeb"),
    "a login that hangs": (
        lambda lab: faults.hanging_login(lab, "nodeb"), "on nodeb had not started after 4 sec",
    ),
    "a firewall there": (lambda lab: faults.firewall(lab, "nodeb"), "nodeb"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCHECKED)
def test_a_fault_is_one_sentence_without_a_check_too(lab: Lab, name: str) -> None:
    fault, pattern = UNCHECKED[name]
    started = time.monotonic()
    with fault(lab):
        done = hvdlite_run(lab, *SSH, "--no-check-hosts", "--start-timeout=4", "-H", ALL,
                           sys.executable, "-c", SUM, timeout=30)  # fmt: skip
    assert done.returncode not in (0, None) and not sums(done), done
    assert time.monotonic() - started < 20
    assert re.search(pattern, sentences(done)[-1]), done
    assert done.stderr.count("\n") == 1 or name == "a firewall there", done


@pytest.mark.parametrize("fault", [faults.cut, faults.unplugged])
def test_a_lost_host_ends_the_job_within_the_peer_timeout(lab: Lab, fault: faults.Cut) -> None:
    words = (*SSH, "-H", ALL, sys.executable, "-c", FOREVER)
    with in_the_middle(lab, *words, HVDLITE_PEER_TIMEOUT=str(PEER_SECONDS)) as running:
        started = time.monotonic()
        with fault(lab, "nodeb"):
            done = running.finish(30)
            assert time.monotonic() - started < PEER_SECONDS + 10
            assert done.returncode != 0 and re.search("rank 1|nodeb", sentences(done)[-1]), done
            # The agent of nodeb finds out by itself that it is cut off; sshd there does not.
            wait_for_end(lab)
            lab.end_sessions("nodeb")


def wait_for_end(lab: Lab, seconds: float = PEER_SECONDS + 10) -> None:
    """Wait until nothing but sessions of sshd runs in any host."""
    deadline = time.monotonic() + seconds
    while left := [
        command for host in lab.nodes for command in lab.processes(host).values()
        if not command.startswith("sshd: ")
    ]:  # fmt: skip
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def kill(lab: Lab, host: str, word: str, number: int) -> None:
    pids = [pid for pid, command in lab.processes(host).items() if re.search(word, command)]
    assert pids, (word, lab.processes(host))
    for pid in pids:
        os.kill(pid, number)


def launcher_gets(number: int) -> Callable[[Lab, Running], None]:
    return lambda _lab, running: running.signal(number)


ENDS: dict[str, tuple[Callable[[Lab, Running], None], int, str]] = {
    "a rank is killed": (
        lambda lab, _: kill(lab, "nodeb", "hvdlite.numpy", signal.SIGKILL), 137,
        "rank 1 was killed by SIGKILL",
    ),
    "the connection of ssh is killed": (
        lambda lab, _: kill(lab, "nodeb", "sshd: root", signal.SIGKILL), 137, "rank 1|nodeb",
    ),
    "an agent is killed": (
        lambda lab, _: kill(lab, "nodec", r"^(?!.*(env |cd /)).*agent_process", signal.SIGKILL),
        137, "rank 2",
    ),
    "Ctrl-C": (launcher_gets(signal.SIGINT), 130, "ended by SIGINT"),
    "SIGTERM": (launcher_gets(signal.SIGTERM), 143, "ended by SIGTERM"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_whatever_ends_a_job_ends_all_of_it(lab: Lab, name: str) -> None:
    action, code, pattern = ENDS[name]
    with in_the_middle(lab, *SSH, "-H", ALL, sys.executable, "-c", FOREVER) as running:
        action(lab, running)
        done = running.finish(20)
        assert done.returncode == code and re.search(pattern, sentences(done)[-1]), done
        wait_for_end(lab)


def test_a_killed_launcher_leaves_no_process_on_any_host(lab: Lab) -> None:
    with in_the_middle(lab, *SSH, "-H", ALL, sys.executable, "-c", FOREVER) as running:
        running.signal(signal.SIGKILL)
        running.process.wait(10)
        wait_for_end(lab)
    lab.clear()  # a folder with named pipes may be left by SIGKILL, as docs/launcher.md says


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("raise ValueError('bad')", 1, "rank 1 failed: ValueError: bad"),
        ("os._exit(7)", 7, "rank 1 failed with exit code 7"),
    ],
)
def test_a_remote_rank_that_fails_is_named(lab: Lab, end: str, code: int, words: str) -> None:
    script = FOREVER.replace("while True:", f"while True:\n    if hvd.rank() == 1: {end}")
    done = hvdlite_run(lab, *SSH, "-H", ALL, sys.executable, "-c", script)
    assert done.returncode == code and sentences(done)[-1].startswith(words), done


CALL = """
import hvdlite, sys
def work(x, data):
    import hvdlite.numpy as hvd, numpy as np, os
    hvd.init()
    total = hvd.allreduce(np.full(2, x * (hvd.rank() + 1.0)), op=hvd.Sum, name="x")
    return hvd.rank(), os.uname().nodename, len(data), total.tolist()
if __name__ == "__main__":
    data = b"x" * 3_000_000
    print(hvdlite.run(work, args=(2, data), hosts="nodea:1,nodeb:1,nodec:1"))
"""


def test_a_function_runs_on_hosts_that_share_no_folder(lab: Lab) -> None:
    done = lab.run("nodea", sys.executable, "-c", CALL, cwd="/tmp", HVDLITE_LAUNCHER="ssh")
    each = [(rank, host, 3_000_000, [12.0, 12.0]) for rank, host in enumerate(lab.nodes)]
    assert done.stdout == f"{each}\n", done


def test_a_function_needs_the_same_python_everywhere(lab: Lab) -> None:
    with faults.other_python(lab, "nodeb") as version:
        done = lab.run("nodea", sys.executable, "-c", CALL, cwd="/tmp", HVDLITE_LAUNCHER="ssh")
    assert done.returncode == 1 and f"host nodeb has Python {version}." in done.stderr, done


def test_a_second_ctrl_c_while_hosts_are_checked_is_not_needed(lab: Lab) -> None:
    with (
        faults.hanging_login(lab, "nodeb"),
        lab.start("nodea", sys.executable, "-m", "hvdlite.launcher", "-H", ALL, "true") as running,
    ):
        deadline = time.monotonic() + 10
        while not lab.processes("nodeb") and time.monotonic() < deadline:
            time.sleep(0.01)
        running.signal(signal.SIGINT)
        done = running.finish(10)
        assert done.returncode == 130 and done.stderr == "hvdlite-run: ended by SIGINT\n", done
