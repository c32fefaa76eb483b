"""What --check-hosts finds on simulated hosts, and what a job says before it starts."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy
import pytest

import hvdlite
from hvdlite.common.requests.messages import PROTOCOL_VERSION
from tests.hosts import faults
from tests.hosts.jobs import ALL, hvdlite_run, sentences
from tests.hosts.lab import HOSTS, SHARED, Lab, address, address6

MESSAGES = Path(hvdlite.__file__).parent / "common" / "requests" / "messages.py"
NUMPY = Path(str(importlib.metadata.distribution("numpy")._path))  # type: ignore[attr-defined]


def check(lab: Lab, *words: str, hosts: str = ALL, **more: str) -> subprocess.CompletedProcess[str]:
    return hvdlite_run(lab, "--check-hosts", *words, "-H", hosts, **more)


def test_each_host_is_a_line_with_all_that_was_found(lab: Lab) -> None:
    done = check(lab)
    assert done.returncode == 0 and done.stderr == "", done
    lines = done.stdout.splitlines()
    python = "{}.{}.{}".format(*sys.version_info)
    for host, line in zip(HOSTS, lines, strict=False):
        assert line.startswith(
            f"{host}: Python {python} ({sys.executable}), "
            f"hvdlite {hvdlite.__version__} (protocol {PROTOCOL_VERSION}), mpi4py "
        ), line
        assert f"numpy {numpy.__version__}" in line
        assert f", working directory {SHARED}, " in line
        assert f"{len(os.sched_getaffinity(0))} core" in line or "cores" in line
        assert line.endswith(
            f"connected by eth0 ({address(host)}, {address6(host)}), "
            f"eth1 ({address(host, 1)}, {address6(host, 1)})"
        ), line
    assert lines[3:] == [
        "all hosts can be used; networks that connect them: "
        "10.88.0.0/24, 10.88.1.0/24, fd88::/64, fd88:0:0:1::/64"
    ]


def test_a_name_an_address_and_a_full_name_are_hosts(lab: Lab) -> None:
    hosts = (address("nodea"), "nodeb.job.ns.svc", address("nodec", 1))
    done = check(lab, hosts=",".join(hosts))
    assert done.returncode == 0, done
    assert [line.split(":")[0] for line in done.stdout.splitlines()[:3]] == [*hosts]


def test_docker_is_found_where_two_hosts_have_the_same_address(lab: Lab) -> None:
    with faults.docker(lab, "nodea", "nodeb"):
        done = check(lab)
    assert done.returncode == 0, done
    line = "nodeb: 172.17.0.1 (docker0) does not lead to it from nodea: nodea has the same address"
    assert line in done.stdout.splitlines() and "172.17" not in done.stdout.splitlines()[-1]


def test_a_host_behind_the_address_of_another_is_found_by_its_nonce(lab: Lab) -> None:
    """nodec has an address of nodeb on a network of its own, which nodea does not reach."""
    lab.ip("nodeb", "addr add 10.88.1.99/32 dev lo")
    lab.ip("nodec", "addr add 10.88.1.99/24 dev eth1")
    try:
        lab.ip("nodeb", "link add dummy99 type bridge",
               "link add veth99 type veth peer name peer99",
               "link set veth99 master dummy99 up", "link set peer99 up", "link set dummy99 up",
               "addr add 10.88.1.99/32 dev dummy99")  # fmt: skip
        done = check(lab, "--tcp-ports=12000-12000")
    finally:
        lab.ip("nodeb", "addr del 10.88.1.99/32 dev lo", "link del veth99", "link del dummy99")
        lab.ip("nodec", "addr del 10.88.1.99/24 dev eth1")
    # Whichever of the two answers first, nodea finds that it is not the other one.
    line = r"node[bc]: 10\.88\.1\.99 .* does not lead to it from nodea: another host answers there"
    assert re.search(line, done.stdout), done.stdout


Fault = Callable[[Lab], AbstractContextManager[object]]
# A fault of nodeb, and the sentence about it.
FAULTS: dict[str, tuple[Fault, str]] = {
    "unknown host key": (
        lambda lab: faults.unknown_host_key(lab, "nodea", "nodeb"),
        r"host nodeb cannot be used: its key is not known to ssh here\. Remedy: ssh-keyscan nodeb",
    ),
    "wrong host key": (
        lambda lab: faults.wrong_host_key(lab, "nodea", "nodeb"),
        r"host nodeb cannot be used: its key is not the one .* Remedy: ssh-keygen -R nodeb",
    ),
    "no key": (
        lambda lab: faults.no_key(lab, "nodeb"),
        r"host nodeb cannot be used: it refuses the login\. Remedy: ssh-copy-id nodeb",
    ),
    "no environment": (
        lambda lab: faults.no_environment(lab, "nodeb"),
        rf"host nodeb cannot be used: there is no Python at {re.escape(sys.executable)}\. Remedy",
    ),
    "another Python": (
        lambda lab: faults.other_python(lab, "nodeb"),
        r"host nodeb has Python 3\.\d+\.\d+ .*, and host nodea has Python .*: make the same Python",
    ),
    "another protocol": (
        lambda lab: faults.replaced(lab, "nodeb", MESSAGES, MESSAGES.read_text().replace(
            f"PROTOCOL_VERSION = {PROTOCOL_VERSION}", "PROTOCOL_VERSION = 99")),
        r"host nodeb has hvdlite .* \(protocol 99\), and host nodea has .*: install the same",
    ),
    "a missing package": (
        lambda lab: faults.hidden(lab, "nodeb", NUMPY), "host nodeb has no numpy, and host nodea",
    ),
    "a broken hvdlite": (
        lambda lab: faults.replaced(lab, "nodeb", MESSAGES, "raise ImportError('broken')"),
        r"hvdlite cannot be used on host nodeb by .* \(ImportError: broken\): make the same Python",
    ),
    "no hvdlite": (
        lambda lab: faults.hidden(lab, "nodeb", Path(hvdlite.__file__).parent),
        r"hvdlite cannot be used on host nodeb by .* \(ModuleNotFoundError: .*: make the same",
    ),
    "a firewall there": (
        lambda lab: faults.firewall(lab, "nodeb"),
        r"host nodea cannot connect to host nodeb at 10\.88\.0\.2 \(eth0\): Connection refused",
    ),
    "a firewall here": (
        lambda lab: faults.firewall(lab, "nodea", drop=True),
        r"host nodeb cannot connect to host nodea at 10\.88\.0\.1 \(eth0\): timed out, although",
    ),
    "dropped packets": (
        lambda lab: faults.unreachable(lab, "nodeb"),
        r"host nodeb cannot be used: the network does not lead to it\. Remedy",
    ),
    "a cut cable": (
        lambda lab: faults.cut(lab, "nodeb"),
        r"host nodeb cannot be used: the network does not lead to it\. Remedy",
    ),
    "a silent sshd": (
        lambda lab: faults.frozen(lab, "nodeb"),
        r"host nodeb cannot be used: its ssh server accepts connections and does not answer",
    ),
    "a login that hangs": (
        lambda lab: faults.hanging_login(lab, "nodeb"),
        r"host nodeb cannot be used: ssh connects, and has not started Python in 6 seconds",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_sentence_and_nothing_starts(lab: Lab, name: str) -> None:
    fault, pattern = FAULTS[name]
    started = time.monotonic()
    with fault(lab):
        done = hvdlite_run(lab, "--start-timeout=6", "-H", ALL, sys.executable, "-c",
                           "print('started')", timeout=20)  # fmt: skip
    assert done.returncode == 1 and done.stdout == "", done
    (sentence,) = [text for text in sentences(done) if not text.startswith("warning: ")]
    assert re.match(pattern, sentence), sentence
    assert done.stderr.count("\n") == len(sentences(done)), done.stderr  # and nothing else
    assert time.monotonic() - started < 19


@pytest.mark.parametrize(
    ("host", "words", "pattern"),
    [
        ("nowhere", (), r"host nowhere cannot be used: its name has no address\."),
        ("10.99.0.1", (), r"host 10\.99\.0\.1 cannot be used: the network does not lead to it\."),
        ("nodeb", ("--ssh-port=23",), r"host nodeb cannot be used: no ssh server listens there\."),
        (
            "nodeb",
            ("--network-interfaces=ib0",),
            r"host nodea has no interface .*: it has eth0",
        ),
    ],
)
def test_a_host_that_is_not_there_is_one_sentence(
    lab: Lab, host: str, words: tuple[str, ...], pattern: str
) -> None:
    done = check(lab, *words, hosts=f"nodea,{host}")
    assert done.returncode == 1, done
    assert [line for line in done.stdout.splitlines() if re.match(pattern, line)], done.stdout


def test_every_problem_of_every_host_is_said(lab: Lab) -> None:
    with faults.no_key(lab, "nodeb"), faults.no_environment(lab, "nodec"):
        done = check(lab)
    text = done.stdout
    assert done.returncode == 1
    assert "host nodeb cannot be used: it refuses" in text and "host nodec cannot be used" in text


def test_the_launcher_is_one_of_the_hosts_where_mpi_connects_back_to_it(lab: Lab) -> None:
    with faults.firewall(lab, "nodea"):
        done = check(lab, "--launcher=mpirun", hosts="nodeb,nodec")
    assert "host nodeb cannot connect to host this host at 10.88.0.1" in done.stdout, done


def test_a_working_directory_that_is_missing_there(lab: Lab) -> None:
    lab.run("nodea", "mkdir", "/tmp/here")
    done = check(lab, cwd="/tmp/here")
    lab.run("nodea", "rmdir", "/tmp/here")
    assert "the working directory /tmp/here does not exist on host nodeb" in done.stdout, done


def test_a_host_that_prints_something_at_login_is_no_problem(lab: Lab) -> None:
    profile = lab.home("nodeb") / ".ssh" / "rc"
    profile.write_text("echo Welcome to this machine; echo be nice >&2; cat >/dev/null\n")
    try:
        done = check(lab)
    finally:
        profile.unlink()
    assert done.returncode == 0, done


def test_check_hosts_needs_hosts(lab: Lab) -> None:
    done = hvdlite_run(lab, "--check-hosts")
    assert done.returncode == 2 and "needs hosts" in done.stderr
