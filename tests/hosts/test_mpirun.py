"""Jobs on several hosts whose ranks mpirun starts, and talk by MPI: what may go wrong there."""

from __future__ import annotations

import os
import sys
import time

import pytest

from hvdlite.launcher.mpirun.mpi import OPENMPI, find_all
from tests.hosts import faults
from tests.hosts.jobs import ALL, FOREVER, SUM, hvdlite_run, in_the_middle, sentences, sums
from tests.hosts.lab import Lab

USED = next(find_all(os.environ), None)
pytestmark = pytest.mark.skipif(USED is None or USED.kind != OPENMPI, reason="there is no Open MPI")
MPIRUN = ("--launcher=mpirun", "--start-timeout=20")
MPI = {"HVDLITE_TRANSPORT": "mpi"}


@pytest.mark.parametrize("check", [(), ("--no-check-hosts",)])
def test_docker_on_two_hosts_crashes_no_rank(lab: Lab, check: tuple[str, ...]) -> None:
    words = (*MPIRUN, *check, "-H", ALL, sys.executable, "-c", SUM)
    with faults.docker(lab, "nodea", "nodeb"):
        done = hvdlite_run(lab, *words, **MPI)
    assert done.returncode == 0 and sums(done) == {0: 6.0, 1: 6.0, 2: 6.0}, done


def test_a_network_card_that_leads_nowhere_is_left_out(lab: Lab) -> None:
    with faults.cut(lab, "nodeb", networks=[1]):
        done = hvdlite_run(lab, *MPIRUN, "-H", ALL, sys.executable, "-c", SUM, **MPI)
    assert done.returncode == 0 and sums(done) == {0: 6.0, 1: 6.0, 2: 6.0}, done


def test_several_network_interfaces(lab: Lab) -> None:
    words = (*MPIRUN, "--network-interfaces=eth1,eth0", "-H", ALL, sys.executable, "-c", SUM)
    done = hvdlite_run(lab, *words, **MPI)
    assert done.returncode == 0 and sums(done) == {0: 6.0, 1: 6.0, 2: 6.0}, done


@pytest.mark.parametrize("fault", [faults.cut, faults.unplugged])
def test_a_lost_host_ends_the_job_with_its_name(lab: Lab, fault: faults.Cut) -> None:
    words = (*MPIRUN, "-H", ALL, sys.executable, "-c", FOREVER)
    with in_the_middle(lab, *words, HVDLITE_PEER_TIMEOUT="3", **MPI) as running:
        started = time.monotonic()
        with fault(lab, "nodeb"):
            done = running.finish(30)
            assert time.monotonic() - started < 28
            assert sentences(done)[-1].startswith("rank 1 is lost with host nodeb, which has not")
            assert lab.left(10, hosts=["nodea", "nodec"]) == {}  # nobody can reach nodeb


def test_a_firewall_that_blocks_the_launcher_is_said(lab: Lab) -> None:
    words = (*MPIRUN, "-H", ALL, sys.executable, "-c", SUM)
    with faults.firewall(lab, "nodea", drop=True):
        done = hvdlite_run(lab, *words, **MPI)
    assert done.returncode == 1
    (sentence,) = sentences(done)
    assert sentence.startswith("host nodeb cannot connect to host nodea at 10.88.0.1"), done
    with faults.firewall(lab, "nodea"):
        done = hvdlite_run(lab, "--no-check-hosts", *words, **MPI)
    assert done.returncode == 1 and "cannot be used: ssh works, but Open MPI" in done.stderr, done
    assert len(done.stderr.splitlines()) == 1, done


def test_a_firewall_on_a_worker_ends_the_job_without_a_check_too(lab: Lab) -> None:
    words = ("--launcher=mpirun", "--start-timeout=6", "--no-check-hosts", "-H", "nodea:1,nodeb:1")
    with faults.firewall(lab, "nodeb"):
        done = hvdlite_run(lab, *words, sys.executable, "-c", SUM, timeout=30, **MPI)
    assert done.returncode not in (0, None) and sentences(done), done


def test_ports_that_the_user_has_opened_are_enough(lab: Lab) -> None:
    """As docs/troubleshooting.md says it."""
    ports = {
        "OMPI_MCA_btl_tcp_port_min_v4": "12000",
        "OMPI_MCA_btl_tcp_port_range_v4": "50",
        "OMPI_MCA_btl_tcp_port_min_v6": "12000",
        "OMPI_MCA_btl_tcp_port_range_v6": "50",
        "PRTE_MCA_oob_tcp_dynamic_ipv4_ports": "12100-12150",
        "PRTE_MCA_oob_tcp_dynamic_ipv6_ports": "12100-12150",
    }
    opened = (22, *range(12000, 12050), *range(12100, 12151))
    words = (*MPIRUN, "-H", "nodea:1,nodeb:1", sys.executable, "-c", SUM)
    with (
        faults.firewall(lab, "nodea", ports=opened),
        faults.firewall(lab, "nodeb", ports=opened),
    ):
        done = hvdlite_run(lab, *words, **ports, **MPI)
        assert done.returncode == 0 and sums(done) == {0: 3.0, 1: 3.0}, done


def test_each_host_counts_its_own_cores(lab: Lab) -> None:
    """Ranks of a host with fewer cores get fewer threads, by every launcher."""
    cores = sorted(os.sched_getaffinity(0))
    pid = lab.nodes["nodeb"].pid
    script = (
        "import os, socket; print('threads', socket.gethostname(), os.environ['OMP_NUM_THREADS'])"
    )
    os.sched_setaffinity(pid, cores[:1])
    try:
        for launcher in ("mpirun", "ssh"):
            done = hvdlite_run(lab, f"--launcher={launcher}", "-H", "nodea:1,nodeb:1",
                               sys.executable, "-c", script)  # fmt: skip
            words = sorted(line.partition("threads ")[2] for line in done.stdout.splitlines())
            assert words == [f"nodea {len(cores)}", "nodeb 1"], done
    finally:
        os.sched_setaffinity(pid, cores)
