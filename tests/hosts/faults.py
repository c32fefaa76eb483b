"""What can be wrong with hosts and the network between them: each fault lasts as long as its block.

with cut(lab, "nodeb"):
    ...
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.hosts.lab import INSIDE, NETWORKS, Lab, do, environment, program

Cut = Callable[[Lab, str], AbstractContextManager[None]]
DOCKER = "172.17.0.1"  # the address of docker0 on every host that has Docker
HANG = "sleep 1000000"
PYTHONS = ("/usr/bin", "/usr/local/bin", "~/.pyenv/versions/*/bin", "/opt/python/*/bin")


@contextlib.contextmanager
def cut(lab: Lab, host: str, networks: Sequence[int] = NETWORKS) -> Iterator[None]:
    """Cut the cables of a host: packets vanish, and neither side loses its carrier."""
    lab.ip("hub", *(f"link set {host}{net} nomaster" for net in networks))
    try:
        yield
    finally:
        lab.ip("hub", *(f"link set {host}{net} master br{net}" for net in networks))


@contextlib.contextmanager
def unplugged(lab: Lab, host: str, networks: Sequence[int] = NETWORKS) -> Iterator[None]:
    """Pull the plugs of a host: its interfaces lose their carrier."""
    lab.ip("hub", *(f"link set {host}{net} down" for net in networks))
    try:
        yield
    finally:
        lab.ip("hub", *(f"link set {host}{net} up" for net in networks))


@contextlib.contextmanager
def slow_link(lab: Lab, host: str, mbit: int, networks: Sequence[int] = NETWORKS) -> Iterator[None]:
    """Let a host send, and be sent, only so much a second in each network."""
    if program("tc") is None:
        pytest.skip("a slow link needs tc")
    limit = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "32kb", "latency", "100ms")
    places = [(lab.nodes[host].pid, f"eth{net}") for net in networks]
    places += [(lab.hub.pid, f"{host}{net}") for net in networks]

    def change(what: str, *words: str) -> None:
        for pid, device in places:
            do(["nsenter", "-t", str(pid), "-n", "tc", "qdisc", what, "dev", device, *words])

    change("add", *limit)
    try:
        yield
    finally:
        change("del", "root")


@contextlib.contextmanager
def docker(lab: Lab, *hosts: str) -> Iterator[None]:
    """Give the hosts a docker0 with one and the same address, and a container that makes it UP."""
    for host in hosts:
        lab.ip(
            host, "link add docker0 type bridge", f"addr add {DOCKER}/16 dev docker0",
            "link add veth0 type veth peer name container0", "link set veth0 master docker0 up",
            "link set container0 up", "link set docker0 up",
        )  # fmt: skip
    try:
        yield
    finally:
        for host in hosts:
            lab.ip(host, "link del veth0", "link del docker0")


@contextlib.contextmanager
def firewall(
    lab: Lab, host: str, *, ports: Sequence[int] = (22,), drop: bool = False, protocol: str = "tcp"
) -> Iterator[None]:
    """Let only these ports of a host, and answers to its own connections, be reached from others.

    Other packets are dropped, or rejected as a firewall does that says so.
    """
    if program("iptables") is None:
        pytest.skip("a firewall needs iptables")
    what = ["DROP"] if drop else ["REJECT", "--reject-with", "tcp-reset"]
    here = ["-i", "lo", "-j", "ACCEPT"]
    known = ["-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT"]
    open_ports = [["-p", "tcp", "--dport", str(port), "-j", "ACCEPT"] for port in ports]
    rules = [here, known, *open_ports, ["-p", protocol, "-j", *what]]
    tables = ("iptables", "ip6tables")
    try:
        for table in tables:
            for rule in rules:
                _must(lab, host, table, "-A", "INPUT", *rule)
        yield
    finally:
        for table in tables:
            _must(lab, host, table, "-F", "INPUT")


@contextlib.contextmanager
def unreachable(lab: Lab, host: str) -> Iterator[None]:
    """Drop every packet to a host, ssh's own included; the host itself can reach others."""
    with firewall(lab, host, ports=(), drop=True):
        yield


@contextlib.contextmanager
def frozen(lab: Lab, host: str) -> Iterator[None]:
    """Let the sshd of a host accept connections, and never say a word."""
    os.kill(lab.nodes[host].pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(lab.nodes[host].pid, signal.SIGCONT)


@contextlib.contextmanager
def hanging_login(lab: Lab, host: str) -> Iterator[None]:
    """Let a host accept the login, and run something that never says a word, nor ends."""
    path = _ssh(lab, host, "authorized_keys")
    with _changed(path, f'command="exec {HANG}" {path.read_text()}'):
        try:
            yield
        finally:
            for pid, command in lab.processes(host).items():
                if command == HANG:
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def no_key(lab: Lab, host: str) -> Iterator[None]:
    """Let a host know no key of the user, so that it refuses the login."""
    with _changed(_ssh(lab, host, "authorized_keys"), ""):
        yield


@contextlib.contextmanager
def unknown_host_key(lab: Lab, host: str, of: str) -> Iterator[None]:
    """Let `host` not know the key of the sshd of the host `of`."""
    path = _ssh(lab, host, "known_hosts")
    lines = [line for line in path.read_text().splitlines() if not line.startswith(of)]
    with _changed(path, "".join(f"{line}\n" for line in lines)):
        yield


@contextlib.contextmanager
def wrong_host_key(lab: Lab, host: str, of: str) -> Iterator[None]:
    """Let `host` know a key of another machine as that of the host `of`."""
    path = _ssh(lab, host, "known_hosts")
    key = (lab.folder / "user_key.pub").read_text().split()[1]
    lines = [
        " ".join([*line.split()[:2], key] if line.startswith(of) else [line])
        for line in path.read_text().splitlines()
    ]
    with _changed(path, "".join(f"{line}\n" for line in lines)):
        yield


@contextlib.contextmanager
def hidden(lab: Lab, host: str, *paths: str | os.PathLike[str]) -> Iterator[None]:
    """Let a host see an empty folder, or an empty file, in the place of each path."""
    for path in map(os.path.realpath, paths):
        empty = "-t tmpfs lab" if os.path.isdir(path) else "--bind /dev/null"
        _must(lab, host, "sh", "-c", f"mount {empty} {shlex.quote(path)}")
    try:
        yield
    finally:
        for path in map(os.path.realpath, paths):
            _must(lab, host, "umount", "-l", path)


@contextlib.contextmanager
def replaced(lab: Lab, host: str, path: str | os.PathLike[str], text: str) -> Iterator[None]:
    """Let a host see another text, or program, in the place of a file."""
    path = os.path.realpath(path)
    ours = lab.folder / host / f"instead-{os.path.basename(path)}"
    ours.write_text(text)
    ours.chmod(os.stat(path).st_mode & 0o777)
    _must(lab, host, "mount", "--bind", str(INSIDE / host / ours.name), path)
    try:
        yield
    finally:
        _must(lab, host, "umount", "-l", path)
        ours.unlink()


@contextlib.contextmanager
def no_environment(lab: Lab, host: str) -> Iterator[None]:
    """Hide the Python environment of the tests on a host."""
    with hidden(lab, host, sys.prefix):
        yield


@contextlib.contextmanager
def other_python(lab: Lab, host: str) -> Iterator[str]:
    """Let the environment of a host have a Python of another minor version; gives that version.

    Where this machine has none, the same Python says that it is another one.
    """
    version, python = find_other_python() or (f"3.{sys.version_info[1] + 1}", None)
    folder = lab.folder / host / "bin"
    shutil.copytree(Path(sys.prefix) / "bin", folder, symlinks=True)
    names = ["python", "python3", f"python3.{sys.version_info[1]}", Path(sys.executable).name]
    for name in names:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(_disguise(python, version))
        (folder / name).chmod(0o755)
    target = str(Path(sys.prefix) / "bin")
    _must(lab, host, "mount", "--bind", str(INSIDE / host / "bin"), target)
    try:
        yield version
    finally:
        _must(lab, host, "umount", "-l", target)
        shutil.rmtree(folder)


def find_other_python() -> tuple[str, str] | None:
    """Return version and path of a Python 3 of another minor version, if there is one."""
    for pattern in PYTHONS:
        where = Path(pattern).expanduser()
        for folder in Path("/").glob(str(where).lstrip("/")):
            for minor in range(10, 20):
                python = folder / f"python3.{minor}"
                if minor != sys.version_info[1] and python.exists() and _works(python):
                    return f"3.{minor}", str(python)
    return None


def _works(python: Path) -> bool:
    done = subprocess.run([python, "-c", "import json"], env=environment({}), timeout=20,
                          capture_output=True, check=False)  # fmt: skip
    return done.returncode == 0


def _disguise(python: str | None, version: str) -> str:
    if python is not None:
        return f'#!/bin/sh\nexec {shlex.quote(python)} "$@"\n'
    minor = version.partition(".")[2]
    pretend = (
        "import sys, platform; V = type(sys.version_info); "
        f"platform.python_version = lambda: '{version}.0'; "
        f"sys.version_info = (3, {minor}, 0, 'final', 0)"
    )
    code = shlex.quote(pretend)
    real = shlex.quote(os.path.realpath(sys.executable))
    return (
        "#!/bin/sh\n"
        'if [ "$1" = -c ]; then code=$2; shift 2; '
        f'exec {real} -c {code}"\n$code" "$@"; fi\n'
        f'exec {real} "$@"\n'
    )


def _ssh(lab: Lab, host: str, name: str) -> Path:
    return lab.home(host) / ".ssh" / name


@contextlib.contextmanager
def _changed(path: Path, text: str) -> Iterator[None]:
    before = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


def _must(lab: Lab, host: str, *command: str) -> None:
    done = lab.run(host, *command, cwd="/", timeout=20)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
