"""What the probes of several hosts have found becomes sentences and networks."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from hvdlite.launcher.hosts.host_report import Address, Attempt, Facts, HostReport
from hvdlite.launcher.hosts.probe import OTHER_HOST, try_all
from hvdlite.launcher.hosts.ssh import explain_agent, explain_silence
from tests.limits import HANG_SECONDS

PACKAGES = {"numpy": "2.0", "mpi4py": "4.1.0"}


def facts(number: int, *more: Address, **changed: object) -> Facts:
    addresses = (Address("eth0", f"10.0.0.{number}", 24), *more)
    plain = Facts(
        python="3.11.7", executable="/env/bin/python", identity=(f"boot {number}", 1),
        directory=True, cores=2, packages=PACKAGES, addresses=addresses, hvdlite="0.1.0",
        protocol=3,
    )  # fmt: skip
    return replace(plain, **changed)  # type: ignore[arg-type]


def report(attempts: tuple[Attempt, ...] = (), mpi: bool = False, **hosts: Facts) -> HostReport:
    return HostReport(facts=hosts, attempts=attempts, directory="/work", mpi=mpi)


def test_equal_hosts_are_a_line_each() -> None:
    good = report(a=facts(1), b=facts(2, cores=1))
    assert good.problems == good.warnings == ()
    versions = (
        "Python 3.11.7 (/env/bin/python), hvdlite 0.1.0 (protocol 3), numpy 2.0, mpi4py 4.1.0, "
        "working directory /work"
    )
    assert list(good.lines()) == [
        f"a: {versions}, 2 cores, connected by eth0 (10.0.0.1)",
        f"b: {versions}, 1 core, connected by eth0 (10.0.0.2)",
        "all hosts can be used; networks that connect them: 10.0.0.0/24",
    ]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"python": "3.12.1"}, r"host b has Python 3.12.1 .*, and host a has Python"),
        ({"protocol": 4, "hvdlite": "0.2"}, r"host b has hvdlite 0.2 .protocol 4., and host a has"),
        ({"protocol": 0, "hvdlite_error": "ImportError: x"}, "cannot be used on host b by .*Error"),
        ({"packages": {"mpi4py": "4.1.0"}}, "host b has no numpy, and host a has 2.0"),
        ({"directory": False}, "the working directory /work does not exist on host b"),
        ({"addresses": ()}, "host b has no network but loopback"),
        ({"addresses": (), "not_wanted": ("eth1",)}, "host b has no interface .*: it has eth1"),
    ],
)
def test_a_difference_is_one_sentence_that_names_the_host(
    changed: dict[str, object], words: str
) -> None:
    problems = report(a=facts(1), b=facts(2, **changed)).problems
    assert len(problems) == 1
    assert re.search(words, problems[0]), problems


def test_what_only_mpi_needs_is_a_problem_there_alone() -> None:
    without = facts(2, packages={"numpy": "2.0"})
    assert report(a=facts(1), b=without).problems == ()
    assert "no mpi4py" in report(a=facts(1), b=without, mpi=True).problems[0]


def test_mpirun_does_without_the_working_directory() -> None:
    found = report(a=facts(1), b=facts(2, directory=False), mpi=True)
    assert found.problems == () and "does not exist on host b" in found.warnings[0]
    first, second, *_ = found.lines()
    assert ", working directory /work, " in first and ", no working directory /work, " in second


def test_what_a_script_may_need_is_a_warning() -> None:
    more = facts(1, packages={**PACKAGES, "torch": "2.13.0"})
    assert "host b has no torch, and host a has 2.13.0" in report(a=more, b=facts(2)).warnings[0]
    other = facts(2, packages={**PACKAGES, "torch": "2.12.0"})
    differ = "versions of torch differ: 2.13.0 on a, 2.12.0 on b"
    assert report(a=more, b=other).warnings == (differ,)


def test_a_network_is_used_only_where_every_address_leads_to_its_host() -> None:
    docker = Address("docker0", "172.17.0.1", 16)
    attempts = tuple(
        Attempt(origin, target, address, error)
        for origin, target, number in (("a", "b", 2), ("b", "a", 1))
        for address, error in ((f"10.0.0.{number}", ""), ("172.17.0.1", OTHER_HOST))
    )
    found = report(attempts, a=facts(1, docker), b=facts(2, docker))
    assert found.problems == ()
    assert found.networks == ("10.0.0.0/24",) and found.bad_networks == ("172.17.0.0/16",)
    assert found.common_interfaces == ("eth0",)
    lines = list(found.lines())
    assert "b: 172.17.0.1 (docker0) does not lead to it from a: a has the same address" in lines


def test_networks_of_ipv4_come_first() -> None:
    both = report(a=facts(1, Address("eth1", "fd00::1", 64), Address("eth2", "10.1.0.1", 16)))
    assert both.networks == ("10.0.0.0/24", "10.1.0.0/16", "fd00::/64")


def test_a_host_that_another_one_cannot_connect_to_is_named_once() -> None:
    attempts = (
        Attempt("a", "b", "10.0.0.2", "timed out"),
        Attempt("c", "b", "10.0.0.2", "timed out"),
        Attempt("b", "a", "10.0.0.1"),
    )
    found = report(attempts, a=facts(1), b=facts(2), c=facts(3))
    (problem,) = found.problems
    assert problem.startswith("host a cannot connect to host b at 10.0.0.2 (eth0): timed out")
    assert "HVDLITE_TCP_PORTS" in problem
    assert "not connected" in list(found.lines())[1]


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        ((), ["eth0", "eth1"]),
        (("eth1",), ["eth1"]),
        (("10.0.0.0/24",), ["eth0"]),
        (("fd00::/16", "eth0"), ["eth0", "eth1"]),
        (("ib0",), []),
    ],
)
def test_interfaces_that_the_user_names_are_the_only_ones(
    wanted: tuple[str, ...], left: list[str]
) -> None:
    found = facts(1, Address("eth1", "fd00::1", 64)).only(wanted)
    assert [each.interface for each in found.addresses] == left
    assert {*found.not_wanted} == {"eth0", "eth1"} - {*left}


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        ("Host key verification failed.", 255, "not known to ssh here. Remedy: ssh-keyscan b >>"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
         255, "is not the one that ssh knows"),
        ("root@b: Permission denied (publickey).", 255, "the login. Remedy: ssh-copy-id b,"),
        ("ssh: Could not resolve hostname b: Temporary failure in name resolution", 255,
         "its name has no address. Remedy: check the spelling"),
        ("Connection timed out during banner exchange", 255, "accepts connections and does not"),
        ("ssh: connect to host b port 22: Connection timed out", 255, "does not lead to it"),
        ("ssh: connect to host b port 22: No route to host", 255, "no firewall is between"),
        ("ssh: connect to host b port 22: Connection refused", 255, "port with --ssh-port"),
        ("kex_exchange_identification: read: Connection reset by peer", 255, "closed the conn"),
        ("bash: line 1: /env/bin/python: No such file or directory", 127, "there is no Python at"),
        ("/env/bin/python: Permission denied", 126, "there is no Python at"),
        ("Fatal Python error: init_fs_encoding", 1, "exit code 1 and said: Fatal Python error"),
        ("", 3, "the Python there ended with exit code 3"),
    ],
)  # fmt: skip
def test_each_way_to_fail_has_its_cause_and_a_remedy(said: str, code: int, words: str) -> None:
    sentence = explain_agent("b", said, code)
    assert sentence.startswith("host b cannot be used: ") and words in sentence, sentence
    assert " Remedy: " in sentence and "{host}" not in sentence


@pytest.mark.parametrize(("runs", "words"), [(True, "has not answered"), (False, "not started")])
def test_a_host_that_says_nothing(runs: bool, words: str) -> None:
    sentence = explain_silence("b", 5, runs=runs)
    assert words in sentence and "5 seconds" in sentence and "ssh b" in sentence


def test_a_connection_counts_only_with_the_nonce_of_the_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(b"mine")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        peers = [["127.0.0.1", port, "mine"], ["127.0.0.1", port, "another"]]
        found = try_all(peers, 5.0)
        thread.join(5)
    assert found == [["127.0.0.1", ""], ["127.0.0.1", OTHER_HOST]]
    assert try_all([["127.0.0.1", port, "mine"]], 5.0) == [["127.0.0.1", "Connection refused"]]


def test_an_interrupt_during_the_fork_of_a_probe_is_not_lost() -> None:
    """Python ignores what a handler raises there."""
    script = """
import os, signal
from hvdlite.launcher.hosts.check_hosts import Conversation
from hvdlite.launcher.processes.event_loop import EventLoop
probe = Conversation("a", ["cat"], os.environ, 5.0, EventLoop())
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    probe.ask({})
except KeyboardInterrupt:
    print("interrupted", probe.leader.code)
finally:
    probe.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("interrupted None\n", "", 0)
