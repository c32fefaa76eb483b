"""The lab itself: hosts are apart, reach each other by ssh, and every fault does what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.hosts import faults
from tests.hosts.build import build
from tests.hosts.lab import HOSTS, INSIDE, Lab, address, address6

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=1")


def ssh(lab: Lab, host: str, *words: str) -> subprocess.CompletedProcess[str]:
    return lab.run("nodea", *SSH, host, *words)


def text(lab: Lab, host: str, *command: str) -> str:
    done = lab.run(host, *command)
    assert done.returncode == 0, done
    return done.stdout.strip()


def test_each_host_is_apart(lab: Lab) -> None:
    for command in (
        "hostname",
        "cat /proc/sys/kernel/random/boot_id",
        "readlink /proc/self/ns/net",
    ):
        seen = {text(lab, host, *command.split()) for host in HOSTS}
        assert len(seen) == 3, seen
    for folder in ("/tmp", "/dev/shm", "/run", "/run/home"):
        assert (
            text(lab, "nodea", "sh", "-c", f"echo mine >{folder}/file; cat {folder}/file") == "mine"
        )
        assert lab.run("nodeb", "cat", f"{folder}/file").returncode != 0
        lab.run("nodea", "rm", f"{folder}/file")
    assert text(lab, "nodec", "cat", lab.write("shared.txt", "for all")) == "for all"


def test_the_environment_and_the_checkout_are_there(lab: Lab) -> None:
    script = "import hvdlite, sys; print(sys.prefix)"
    assert text(lab, "nodeb", "python", "-c", script) == sys.prefix


@pytest.mark.parametrize("name", [
    "nodeb", "nodeb.job.ns.svc", address("nodeb"), address("nodeb", 1), address6("nodeb"),
])  # fmt: skip
def test_hosts_reach_each_other_by_ssh(lab: Lab, name: str) -> None:
    done = ssh(lab, name, "hostname; echo $HOME")
    assert done.stdout == "nodeb\n/run/home\n", done


def test_a_command_is_signalled_and_its_code_comes_back(lab: Lab) -> None:
    with lab.start("nodeb", "sh", "-c", "trap 'exit 7' TERM; echo up; while :; do sleep 0.01; done"
                   ) as running:  # fmt: skip
        assert running.process.stdout is not None
        assert running.process.stdout.readline() == "up\n"
        running.signal(15)
        assert running.finish(10).returncode == 7


def test_what_is_left_behind_is_found(hosts: Lab) -> None:
    script = (
        "import subprocess as s; open('/dev/shm/file', 'w').close(); "
        "s.Popen(['sleep', '1000'], start_new_session=True, stdout=s.DEVNULL, stderr=s.DEVNULL)"
    )
    hosts.run("nodeb", "python", "-c", script)
    assert hosts.left(0.0) == {"nodeb": ["sleep 1000", "/dev/shm/file"]}
    hosts.clear()
    assert hosts.left() == {}


Fault = Callable[[Lab], AbstractContextManager[object]]
# A fault, and what ssh from nodea to nodeb says of it.
SSH_FAULTS: dict[str, tuple[Fault, str]] = {
    "cut": (lambda lab: faults.cut(lab, "nodeb"), "timed out|No route to host"),
    "unplugged": (lambda lab: faults.unplugged(lab, "nodeb"), "timed out|No route to host"),
    "firewall": (lambda lab: faults.firewall(lab, "nodeb", ports=()), "Connection refused"),
    "unreachable": (lambda lab: faults.unreachable(lab, "nodeb"), "timed out"),
    "frozen": (lambda lab: faults.frozen(lab, "nodeb"), "timed out"),
    "no key": (lambda lab: faults.no_key(lab, "nodeb"), "Permission denied"),
    "unknown host key": (
        lambda lab: faults.unknown_host_key(lab, "nodea", "nodeb"), "Host key verification failed",
    ),
    "wrong host key": (
        lambda lab: faults.wrong_host_key(lab, "nodea", "nodeb"), "IDENTIFICATION HAS CHANGED",
    ),
    "no environment": (lambda lab: faults.no_environment(lab, "nodeb"), "not found|No such file"),
}  # fmt: skip


@pytest.mark.parametrize("name", SSH_FAULTS)
def test_a_fault_is_seen_by_ssh_and_goes_away(lab: Lab, name: str) -> None:
    fault, pattern = SSH_FAULTS[name]
    with fault(lab):
        done = ssh(lab, "nodeb", sys.executable, "--version")
        assert done.returncode != 0
        assert any(part in done.stderr for part in pattern.split("|")), done
        assert ssh(lab, "nodec", "true").returncode == 0
    assert ssh(lab, "nodeb", sys.executable, "--version").returncode == 0


def test_a_firewall_leaves_ssh_alone(lab: Lab) -> None:
    listen = (
        "import socket; s = socket.create_server(('', 5000)); print('up', flush=True); s.accept()"
    )
    connect = f"import socket; socket.create_connection(('{address('nodeb')}', 5000), 1)"
    with lab.start("nodeb", "python", "-c", listen) as running:
        assert running.process.stdout is not None and running.process.stdout.readline()
        for drop, error in ((False, "ConnectionRefusedError"), (True, "TimeoutError")):
            with faults.firewall(lab, "nodeb", drop=drop):
                assert ssh(lab, "nodeb", "true").returncode == 0
                assert error in lab.run("nodea", "python", "-c", connect).stderr
        assert lab.run("nodea", "python", "-c", connect).returncode == 0


def test_docker_has_one_address_on_two_hosts(lab: Lab) -> None:
    with faults.docker(lab, "nodea", "nodeb"):
        for host in ("nodea", "nodeb"):
            line = text(lab, host, "ip", "-brief", "address", "show", "docker0").split()
            assert line[1] == "UP" and "172.17.0.1/16" in line, line
    assert "docker0" not in text(lab, "nodea", "ip", "-brief", "link")


def test_a_login_that_hangs(lab: Lab) -> None:
    with (
        faults.hanging_login(lab, "nodeb"),
        lab.start("nodea", *SSH, "nodeb", "echo up") as running,
        pytest.raises(subprocess.TimeoutExpired),
    ):
        running.finish(0.5)


@pytest.mark.parametrize("disguised", [False, True])
def test_another_python(lab: Lab, disguised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if disguised:
        monkeypatch.setattr(faults, "find_other_python", lambda: None)
    script = "import sys, platform; print(*sys.version_info[:2], platform.python_version())"
    with faults.other_python(lab, "nodeb") as version:
        major, minor, whole = text(lab, "nodeb", sys.executable, "-c", script).split()
        assert f"{major}.{minor}" == version and whole.startswith(f"{version}.")
        assert version != "{}.{}".format(*sys.version_info)
    assert text(lab, "nodeb", sys.executable, "-c", "print()") == ""


def test_a_file_with_another_text(lab: Lab) -> None:
    path = Path(__file__)
    with faults.replaced(lab, "nodeb", path, "other"):
        assert text(lab, "nodeb", "cat", str(path)) == "other"
        assert text(lab, "nodea", "cat", str(path)) == path.read_text().strip()
    assert text(lab, "nodeb", "cat", str(path)) == path.read_text().strip()


def test_a_lab_leaves_nothing_behind() -> None:
    lab = build()
    assert text(lab, "nodea", "ls", str(INSIDE)) != ""
    pids = [lab.hub.pid, *(node.pid for node in lab.nodes.values())]
    lab.close()
    assert not lab.folder.exists()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}/ns/net")]
