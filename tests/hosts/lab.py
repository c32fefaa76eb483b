"""Three simulated hosts, nodea, nodeb and nodec, each with a real sshd, on this machine.

    hub       br0 ---- eth0 of each host    10.88.0.1, .2, .3    fd88::1, ::2, ::3
              br1 ---- eth1 of each host    10.88.1.1, .2, .3    fd88:0:0:1::1, ...

A host is a process in namespaces of its own (network, mounts, processes, hostname, IPC): it has its
own boot id, /tmp, /dev/shm, /run, /etc/hosts and home, with keys that let it log in to the others.
All else is the disk of this machine, as hosts share a file system. The process is an sshd, and the
first of its process namespace, so that the kernel ends all that runs in the host together with it,
and takes network and mounts away. Nothing has a name outside: labs can exist side by side, and a
lab ends with the process that made it. `build.py` makes a lab, `faults.py` breaks one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.limits import patient

ROOT = Path(__file__).parent.parent.parent
HOSTS = ("nodea", "nodeb", "nodec")
DOMAIN = "job.ns.svc"  # nodea.job.ns.svc is a name of nodea, too
NETWORKS = (0, 1)
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
HIDDEN = ("/tmp", "/run", "/dev/shm")  # each host has its own
INSIDE = Path("/run/lab")  # where hosts see the folder of the lab
SHARED = INSIDE / "shared"
HOME = Path("/run/home")
# What this machine has compiled; each home has a copy, so that no host compiles again.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdlite"
READY_SECONDS = 20.0
LONGEST_COMMAND = 100  # so much of a command line is shown
LEFT_SECONDS = 5.0  # how long what was killed may need to go


class CannotBuildError(Exception):
    """The lab may not be made on this machine; the text is the reason."""


@dataclass
class Node:
    """One simulated host."""

    name: str
    number: int  # the last part of its addresses
    folder: Path  # in the lab's folder
    outer: subprocess.Popen[bytes]  # the parent of its first process
    pid: int = 0  # of its first process, which is its sshd

    def path(self, inside: str | os.PathLike[str]) -> Path:
        """Return the path under which this process sees a file of the host."""
        return Path(f"/proc/{self.pid}/root{os.fspath(inside)}")


@dataclass
class Running:
    """A command that runs in a host."""

    process: subprocess.Popen[str]  # nsenter, which waits for the command
    inner: Callable[[], int | None]

    def signal(self, number: int) -> None:
        """Send a signal to the command itself."""
        pid = self.inner()
        if pid is not None:
            os.kill(pid, number)

    def finish(self, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Wait for its end; raises `subprocess.TimeoutExpired`."""
        out, err = self.process.communicate(timeout=patient(timeout))
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)


@dataclass
class Lab:
    """The hosts. `folder` is seen in each of them as ``/run/lab``."""

    folder: Path
    hub: subprocess.Popen[bytes]
    nodes: dict[str, Node] = field(default_factory=dict)

    # -- what runs in a host

    def run(
        self, host: str, *command: str, timeout: float = 60, cwd: str | os.PathLike[str] = SHARED,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a command in a host to its end; when `timeout` seconds are over, it is an error."""
        with self.start(host, *command, cwd=cwd, **variables) as running:
            try:
                return running.finish(timeout)
            except subprocess.TimeoutExpired:
                self.clear()  # another process may hold its output
                out, err = running.process.communicate(timeout=LEFT_SECONDS)
                words = shlex.join(command)
                raise AssertionError(
                    f"{words} did not end in {patient(timeout)} s:\n{out}\n{err}"
                ) from None

    @contextlib.contextmanager
    def start(
        self, host: str, *command: str, cwd: str | os.PathLike[str] = SHARED, **variables: str
    ) -> Iterator[Running]:
        """Start a command in a host; at the end it is killed, if it still runs."""
        # nsenter goes to the root folder.
        words = [*self.enter(host), "sh", "-c", 'cd "$0" && exec "$@"', os.fspath(cwd), *command]
        process = subprocess.Popen(
            words, env=environment(variables), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, errors="replace",
        )  # fmt: skip
        running = Running(process, lambda: child_of(process))
        try:
            yield running
        finally:
            with contextlib.suppress(ProcessLookupError):
                running.signal(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LEFT_SECONDS)
            process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()

    def enter(self, host: str) -> list[str]:
        """Return what goes before a command that is to run in a host."""
        return ["nsenter", "-t", str(self.nodes[host].pid), *["-m", "-u", "-i", "-n", "-p"]]

    def ip(self, where: str, *lines: str) -> None:
        """Run lines of ``ip -batch`` in the network of a host, or of ``"hub"``."""
        pid = self.hub.pid if where == "hub" else self.nodes[where].pid
        do(["nsenter", "-t", str(pid), "-n", "ip", "-batch", "-"], "\n".join(lines) + "\n")

    # -- files

    def write(self, name: str, text: str) -> str:
        """Write a file that all hosts share; returns the path by which they see it."""
        (self.folder / "shared" / name).write_text(text)
        return str(SHARED / name)

    def home(self, host: str) -> Path:
        """Return the home of the user in a host, as this process sees it."""
        return self.nodes[host].folder / "home"

    # -- what is left

    def processes(self, host: str) -> dict[int, str]:
        """Return the processes that run in a host besides its sshd: number here, command line."""
        node = self.nodes[host]
        space = os.readlink(f"/proc/{node.pid}/ns/pid")
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if int(path.name) != node.pid and os.readlink(path / "ns" / "pid") == space:
                    words = " ".join((path / "cmdline").read_text(errors="replace").split("\0"))
                    if words:  # not what has ended, and waits for its parent to notice
                        found[int(path.name)] = words.strip()[:LONGEST_COMMAND]
            except OSError:
                continue
        return found

    def outside(self, host: str, pid: int) -> int:
        """Return the number that a process of a host has outside; raises `ProcessLookupError`."""
        for number in self.processes(host):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{number}/status").read_text()
                if status.partition("NSpid:")[2].splitlines()[0].split()[-1] == str(pid):
                    return number
        raise ProcessLookupError(f"{host} has no process {pid}: {self.processes(host)}")

    def left(
        self, seconds: float = LEFT_SECONDS, hosts: Sequence[str] = HOSTS
    ) -> dict[str, list[str]]:
        """Return what still runs or lies in the hosts when it had some seconds to go."""
        deadline = time.monotonic() + seconds
        while (left := self._left(hosts)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    def _left(self, hosts: Sequence[str]) -> dict[str, list[str]]:
        left = {}
        for host in hosts:
            node = self.nodes[host]
            files = [f"/{path.relative_to(node.path('/'))}" for path in _files(node)]
            if found := [*self.processes(host).values(), *files]:
                left[host] = found
        return left

    def end_sessions(self, host: str) -> None:
        """End the sessions of sshd, which outlive a cut connection by hours."""
        for pid, command in self.processes(host).items():
            if command.startswith("sshd: "):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def clear(self) -> None:
        """Kill what runs in the hosts, and remove their temporary files."""
        for host, node in self.nodes.items():
            for pid in self.processes(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for path in _files(node):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def close(self) -> None:
        """Remove the lab."""
        for node in self.nodes.values():
            for pid in (node.pid, node.outer.pid):
                if pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            node.outer.wait()
            for pipe in (node.outer.stdin, node.outer.stderr):
                if pipe is not None:
                    pipe.close()
        self.hub.kill()
        self.hub.wait()
        assert self.hub.stdin is not None
        self.hub.stdin.close()
        shutil.rmtree(self.folder)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command: a plain login with this Python first in its PATH."""
    path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin:{SBIN}"
    plain = {"PATH": path, "HOME": str(HOME), "LANG": "C.UTF-8"}
    return {**plain, **variables}


def address(host: str, network: int = 0) -> str:
    """Return the IPv4 address of a host on eth0 or eth1."""
    return f"10.88.{network}.{HOSTS.index(host) + 1}"


def address6(host: str, network: int = 0) -> str:
    """Return its IPv6 address."""
    return str(ipaddress.ip_address(f"fd88:0:0:{network}::{HOSTS.index(host) + 1}"))


def _files(node: Node) -> list[Path]:
    """Return the temporary files of a host."""
    keep = [Path(path) for path in kept_paths()]
    return [
        node.path(folder) / name for folder in ("/tmp", "/dev/shm")
        for name in os.listdir(node.path(folder))
        if not any(path.is_relative_to(f"{folder}/{name}") for path in keep)
    ]  # fmt: skip


def kept_paths() -> list[str]:
    """Return what lies in a folder that is hidden, and has to be seen all the same."""
    wanted = [sys.prefix, sys.base_prefix, str(ROOT), os.path.realpath(ROOT)]
    return [
        path for path in dict.fromkeys(wanted)
        if any(path.startswith(f"{hidden}/") for hidden in HIDDEN)
    ]  # fmt: skip


def child_of(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> int | None:
    """Return the number of the child of a process that has at most one."""
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


def do(command: list[str], text: str = "") -> None:
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=READY_SECONDS, check=False,
        env=environment({}),
    )  # fmt: skip
    if done.returncode:
        raise CannotBuildError(f"{shlex.join(command)}: {done.stdout}{done.stderr}".strip())


def program(name: str) -> str | None:
    """Return the path of a program, also of one for the superuser."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{SBIN}")
