"""Elastic jobs on three hosts by real ssh: hosts that die, come, go, hang and come back."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.hosts import faults
from tests.hosts.lab import HOSTS, Lab
from tests.hosts.sites import ThreeHosts
from tests.launcher.elastic.jobs import Place

pytestmark = pytest.mark.timeout(120)
ALL = "nodea:2,nodeb:2,nodec:2"


def numbers(places: list[Place]) -> list[int]:
    return [place.number for place in places]


def wait_for_none(lab: Lab, host: str, seconds: float) -> None:
    """Wait until no worker and no agent runs in a host."""
    deadline = time.monotonic() + seconds
    while left := [line for line in lab.processes(host).values() if "train.py" in line or
                   "launcher.agent" in line]:  # fmt: skip
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_ranks_go_host_by_host_and_a_dead_worker_is_replaced(site: ThreeHosts) -> None:
    with site.elastic("-np", "6", "--min-np", "2", "-H", ALL) as watch:
        first = watch.world(6)
        assert [place.host for place in first] == [h for h in HOSTS for _ in range(2)]
        site.kill(first[3])
        five = watch.world(5)
        assert numbers(five) == numbers([*first[:3], *first[4:]])
        again = watch.world(6, epoch=five[0].epoch + 1)
        assert again[3].host == "nodeb" and again[3].number == 6
        assert site.end(watch) == 0


def test_a_cut_cable_is_noticed_after_the_limit_and_the_host_comes_back(site: ThreeHosts) -> None:
    with site.elastic("-np", "4", "--min-np", "2", "-H", "nodea:2,nodeb:2") as watch:
        first = watch.world(4)
        with faults.cut(site.lab, "nodeb"):
            begin = time.monotonic()
            two = watch.world(2)
            took = time.monotonic() - begin
            assert 0.8 < took < 8, took
            assert numbers(two) == numbers(first)[:2]
            wait_for_none(site.lab, "nodeb", 20.0)
            site.lab.end_sessions("nodeb")
        assert "nodeb" in watch.line("has not answered for 1 seconds")
        again = watch.world(4, epoch=two[0].epoch + 1, timeout=30)
        assert numbers(again)[:2] == numbers(two)
        assert site.end(watch) == 0


def test_a_host_whose_ssh_hangs_does_not_disturb_the_others(site: ThreeHosts) -> None:
    flags = ("-np", "2", "--min-np", "1", "--start-timeout", "3")
    words = (*flags, *site.discovery("nodea:2"))
    with site.elastic(*words) as watch, faults.hanging_login(site.lab, "nodeb"):
        watch.world(2)
        site.show("nodea:2", "nodeb:2")
        watch.line("nodeb", timeout=15)
        assert {place.epoch for place in watch.places()} == {1}
        assert site.end(watch) == 0


def test_sigterm_to_an_agent_lets_its_workers_leave_in_order(site: ThreeHosts) -> None:
    with site.elastic("-np", "4", "--min-np", "2", "-H", "nodea:2,nodeb:2") as watch:
        first = watch.world(4)
        os.kill(site.agent(first[2]), signal.SIGTERM)
        two = watch.world(2)
        assert numbers(two) == numbers(first)[:2]
        assert two[0].step >= first[0].step
        wait_for_none(site.lab, "nodeb", 20.0)
        assert site.end(watch) == 0
    assert not any(line.partition(":")[2].startswith("lost") for line in watch.out)


def test_a_function_returns_the_results_of_the_last_world(site: ThreeHosts) -> None:
    script = (
        "import hvdlite\n"
        "def f(data):\n"
        "    import os, hvdlite.numpy as hvd\n"
        "    hvd.init()\n"
        "    return hvd.rank(), hvd.size(), os.uname().nodename, len(data)\n"
        "hosts = 'nodea:1,nodeb:1,nodec:1'\n"
        "print(hvdlite.run(f, (b'x' * 3_000_000,), hosts=hosts, min_np=2, np=3))\n"
    )
    done = site.lab.run("nodea", "python", "-c", script)
    assert done.stdout.strip() == str([(r, 3, f"node{'abc'[r]}", 3_000_000) for r in range(2)])


def test_a_host_that_cannot_be_reached_is_named_with_the_reason(site: ThreeHosts) -> None:
    flags = ("-np", "2", "--min-np", "1", "-H", "nodea:2,nodeb:1")
    with faults.no_key(site.lab, "nodeb"), site.elastic(*flags) as watch:
        watch.world(2)
        line = watch.line("host nodeb was lost")
        assert "it refuses the login. Remedy: ssh-copy-id nodeb" in line
        assert site.end(watch) == 0


def test_the_script_of_kubeflow_names_the_hosts_of_a_launcher_pod(site: ThreeHosts) -> None:
    """Names of pods without slots; the hostfile, which may name hosts that are not there, waits."""
    hostfile = site.lab.write("hostfile", "nodeb.job.ns.svc slots=2\nno-such-pod slots=2\n")
    variables = {"OMPI_MCA_orte_default_hostfile": hostfile, "K_MPI_JOB_ROLE": "launcher"}
    flags = ("-np", "2", "--min-np", "1", "--slots-per-host", "2")
    words = (*flags, *site.discovery("nodeb.job.ns.svc"))
    with site.elastic(*words, **variables) as watch:
        assert {place.host for place in watch.world(2)} == {"nodeb.job.ns.svc"}
        site.show("nodeb.job.ns.svc", "nodec.job.ns.svc")
        four = watch.world(4)
        assert [place.host[:5] for place in four] == ["nodeb", "nodeb", "nodec", "nodec"]
        assert site.end(watch) == 0
