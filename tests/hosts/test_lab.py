"""The lab itself: hosts are apart, and reach each other by ssh.

That a fault is one, and goes away, is seen by what --check-hosts says of it.
"""

from __future__ import annotations

import os
import subprocess
import sys

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


def test_a_lab_leaves_nothing_behind() -> None:
    lab = build()
    assert text(lab, "nodea", "ls", str(INSIDE)) != ""
    pids = [lab.hub.pid, *(node.pid for node in lab.nodes.values())]
    lab.close()
    assert not lab.folder.exists()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}/ns/net")]
