"""Elastic jobs on three hosts by real ssh: hosts that die, come, go, hang and come back."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hosts import faults
from tests.hosts.jobs import LAUNCHER
from tests.hosts.lab import HOSTS, SHARED, Lab, Running
from tests.launcher.elastic.jobs import SCRIPT, Place, Watch

pytestmark = pytest.mark.timeout(60)
ALL = "nodea:2,nodeb:2,nodec:2"


@dataclass
class LabJob:
    """An elastic job whose launcher runs in nodea."""

    lab: Lab
    running: Running
    watch: Watch

    def end(self, timeout: float = 20) -> int:
        """Let the workers return; return the exit code of the job."""
        (self.lab.folder / "shared" / "end").touch()
        return self.watch.finish(timeout)

    def discover(self, *lines: str) -> None:
        """Let the discovery script print these lines from now on."""
        new = self.lab.folder / "shared" / "hosts.new"
        new.write_text("".join(f"{line}\n" for line in lines))
        new.rename(new.with_suffix(""))


@contextlib.contextmanager
def elastic(lab: Lab, *flags: str, **variables: str) -> Iterator[LabJob]:
    """Start an elastic job; `discover` comes first where it has a discovery script."""
    shared = lab.folder / "shared"
    (shared / "end").unlink(missing_ok=True)
    script = lab.write("train.py", SCRIPT)
    words = (*LAUNCHER, *flags, "python", script, str(SHARED / "end"))
    with lab.start("nodea", *words, **variables) as running:
        watch = Watch(running.process)
        try:
            yield LabJob(lab, running, watch)
        finally:
            with contextlib.suppress(ProcessLookupError):
                running.signal(signal.SIGKILL)
            watch.close()


@contextlib.contextmanager
def discovering(lab: Lab, *lines: str, flags: str = "", **variables: str) -> Iterator[LabJob]:
    """Start an elastic job whose discovery script prints these lines at first."""
    shared = lab.folder / "shared"
    (shared / "hosts").write_text("".join(f"{line}\n" for line in lines))
    path = lab.write("hosts.sh", f"#!/bin/sh\ncat {SHARED / 'hosts'}\n")
    (shared / "hosts.sh").chmod(0o755)
    words = (*flags.split(), "--host-discovery-script", path)
    with elastic(lab, *words, **variables) as job:
        yield job


def outside(lab: Lab, host: str, pid: int) -> int:
    """Return the number that a process of a host has outside of it."""
    for number in lab.processes(host):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{number}/status").read_text()
            if status.partition("NSpid:")[2].splitlines()[0].split()[-1] == str(pid):
                return number
    raise AssertionError(f"{host} has no process {pid}: {lab.processes(host)}")


def kill(lab: Lab, place: Place) -> None:
    os.kill(outside(lab, place.host, place.pid), signal.SIGKILL)


def agent_of(lab: Lab, host: str) -> int:
    """Return the agent of a host."""
    (agent,) = [
        number for number, line in lab.processes(host).items()
        if "hvdlite.launcher.agent" in line and "env " not in line and "cd /" not in line
        and "ssh" not in line
    ]  # fmt: skip
    return agent


def numbers(places: list[Place]) -> list[int]:
    return [place.number for place in places]


def wait_for_none(lab: Lab, host: str, seconds: float) -> None:
    """Wait until no worker and no agent runs in a host."""
    deadline = time.monotonic() + seconds
    while left := [line for line in lab.processes(host).values() if "train.py" in line or
                   "launcher.agent" in line]:  # fmt: skip
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_ranks_go_host_by_host_and_a_dead_worker_is_replaced(lab: Lab) -> None:
    with elastic(lab, "-np", "6", "--min-np", "2", "-H", ALL) as job:
        first = job.watch.world(6)
        assert [place.host for place in first] == [h for h in HOSTS for _ in range(2)]
        kill(lab, first[3])
        five = job.watch.world(5)
        assert numbers(five) == numbers([*first[:3], *first[4:]])
        again = job.watch.world(6, epoch=five[0].epoch + 1)
        assert again[3].host == "nodeb" and again[3].number == 6
        assert job.end() == 0


@pytest.mark.parametrize("what", ["all its processes", "its agent"])
def test_a_host_whose_processes_die_is_lost_at_once(lab: Lab, what: str) -> None:
    with elastic(lab, "-np", "6", "--min-np", "2", "-H", ALL) as job:
        first = job.watch.world(6)
        if what == "its agent":
            os.kill(agent_of(lab, "nodeb"), signal.SIGKILL)
        else:
            for number in lab.processes("nodeb"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
        begin = time.monotonic()
        four = job.watch.world(4)
        assert time.monotonic() - begin < 1.0 + 1.0  # On two cores.
        assert numbers(four) == numbers([*first[:2], *first[4:]])
        job.watch.line("nodeb")
        assert job.end() == 0


def test_a_cut_cable_is_noticed_after_the_limit_and_the_host_comes_back(lab: Lab) -> None:
    with elastic(lab, "-np", "4", "--min-np", "2", "-H", "nodea:2,nodeb:2") as job:
        first = job.watch.world(4)
        with faults.cut(lab, "nodeb"):
            begin = time.monotonic()
            two = job.watch.world(2)
            took = time.monotonic() - begin
            assert 0.8 < took < 1.0 + 0.7, took
            assert numbers(two) == numbers(first)[:2]
            wait_for_none(lab, "nodeb", 4.0)
            lab.end_sessions("nodeb")
        assert "nodeb" in job.watch.line("has not answered for 1 seconds")
        again = job.watch.world(4, epoch=two[0].epoch + 1, timeout=30)
        assert numbers(again)[:2] == numbers(two)
        assert job.end() == 0


def test_hosts_and_slots_come_and_go(lab: Lab) -> None:
    flags = "-np 2 --min-np 1 --max-np 4"
    with discovering(lab, "nodea:2", flags=flags) as job:
        first = job.watch.world(2)
        job.discover("nodea:2", "nodeb:1")
        three = job.watch.world(3)
        assert numbers(three)[:2] == numbers(first)
        job.discover("nodea:2", "nodeb:2")
        four = job.watch.world(4)
        assert numbers(four)[:3] == numbers(three)
        epoch = four[0].epoch
        job.discover("nodea:2", "nodeb:2", "nodec:2")  # beyond --max-np: nobody is disturbed
        job.discover("nodea:1", "nodeb:2")
        lowered = job.watch.world(3, epoch=epoch + 1)
        assert [place.host for place in lowered] == ["nodea", "nodeb", "nodeb"]
        assert numbers(lowered) == [four[0].number, four[2].number, four[3].number]
        job.discover("nodeb:2")  # the host of rank 0 goes
        left = job.watch.world(2, epoch=lowered[0].epoch + 1)
        assert numbers(left) == numbers(lowered)[1:]
        assert job.end() == 0
    assert not any("lost" in line for line in job.watch.out + job.watch.err), job.watch.err


def test_a_host_that_fails_comes_back_after_its_cooldown(lab: Lab) -> None:
    flags = ("--blacklist-cooldown-range", "1", "2")
    with elastic(lab, "-np", "4", "--min-np", "2", "-H", "nodea:2,nodeb:2", *flags) as job:
        first = job.watch.world(4)
        kill(lab, first[2])
        two = job.watch.world(2)
        begin = time.monotonic()
        again = job.watch.world(4, epoch=two[0].epoch + 1)
        assert 1.5 < time.monotonic() - begin < 6
        assert numbers(again)[:2] == numbers(first)[:2]
        assert job.end() == 0


def test_a_host_whose_ssh_hangs_does_not_disturb_the_others(lab: Lab) -> None:
    flags = "-np 2 --min-np 1 --start-timeout 3"
    with discovering(lab, "nodea:2", flags=flags) as job, faults.hanging_login(lab, "nodeb"):
        job.watch.world(2)
        job.discover("nodea:2", "nodeb:2")
        job.watch.line("nodeb", timeout=15)
        assert {place.epoch for place in job.watch.places()} == {1}
        assert job.end() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher_leaves_nothing_on_any_host(lab: Lab, number: int) -> None:
    with elastic(lab, "-np", "6", "--min-np", "2", "-H", ALL) as job:
        first = job.watch.world(6)
        kill(lab, first[5])
        job.running.signal(number)
        job.watch.finish(10)
        for host in HOSTS:
            wait_for_none(lab, host, 4.0)


def test_sigterm_to_an_agent_lets_its_workers_leave_in_order(lab: Lab) -> None:
    with elastic(lab, "-np", "4", "--min-np", "2", "-H", "nodea:2,nodeb:2") as job:
        first = job.watch.world(4)
        os.kill(agent_of(lab, "nodeb"), signal.SIGTERM)
        two = job.watch.world(2)
        assert numbers(two) == numbers(first)[:2]
        assert two[0].step >= first[0].step
        wait_for_none(lab, "nodeb", 5.0)
        assert job.end() == 0
    assert not any(line.partition(":")[2].startswith("lost") for line in job.watch.out)


def test_a_function_returns_the_results_of_the_last_world(lab: Lab) -> None:
    script = (
        "import hvdlite\n"
        "def f(data):\n"
        "    import os, hvdlite.numpy as hvd\n"
        "    hvd.init()\n"
        "    return hvd.rank(), hvd.size(), os.uname().nodename, len(data)\n"
        "hosts = 'nodea:1,nodeb:1,nodec:1'\n"
        "print(hvdlite.run(f, (b'x' * 3_000_000,), hosts=hosts, min_np=2, np=3))\n"
    )
    done = lab.run("nodea", "python", "-c", script)
    assert done.stdout.strip() == str([(r, 3, f"node{'abc'[r]}", 3_000_000) for r in range(2)])


def test_all_hosts_are_replaced_while_discovery_shows_the_old_ones(lab: Lab) -> None:
    with discovering(lab, "nodea:2", flags="-np 2 --min-np 1") as job:
        first = job.watch.world(2)
        job.discover("nodea:2", "nodeb:2")
        four = job.watch.world(4)
        job.discover("nodeb:2")
        left = job.watch.world(2, epoch=four[0].epoch + 1)
        assert numbers(left) == numbers(four)[2:]
        assert left[0].step >= four[0].step >= first[0].step
        assert job.end() == 0


def test_a_host_that_cannot_be_reached_is_named_with_the_reason(lab: Lab) -> None:
    flags = ("-np", "2", "--min-np", "1", "-H", "nodea:2,nodeb:1")
    with faults.no_key(lab, "nodeb"), elastic(lab, *flags) as job:
        job.watch.world(2)
        line = job.watch.line("host nodeb was lost")
        assert "it refuses the login. Remedy: ssh-copy-id nodeb" in line
        assert job.end() == 0


def test_the_script_of_kubeflow_names_the_hosts_of_a_launcher_pod(lab: Lab) -> None:
    """Names of pods without slots; the hostfile, which may name hosts that are not there, waits."""
    hostfile = lab.write("hostfile", "nodeb.job.ns.svc slots=2\nno-such-pod slots=2\n")
    variables = {"OMPI_MCA_orte_default_hostfile": hostfile, "K_MPI_JOB_ROLE": "launcher"}
    flags = "-np 2 --min-np 1 --slots-per-host 2"
    with discovering(lab, "nodeb.job.ns.svc", flags=flags, **variables) as job:
        assert {place.host for place in job.watch.world(2)} == {"nodeb.job.ns.svc"}
        job.discover("nodeb.job.ns.svc", "nodec.job.ns.svc")
        four = job.watch.world(4)
        assert [place.host[:5] for place in four] == ["nodeb", "nodeb", "nodec", "nodec"]
        assert job.end() == 0
