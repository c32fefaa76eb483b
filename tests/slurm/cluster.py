"""A Slurm cluster on this machine: a login host and two nodes, each in namespaces of its own.

A host has its own name, processes, /etc/hosts, /tmp and /dev/shm, and shares the network and all
other files. Slurm runs without systemd and munge. A host is the process that unshare has started:
when it is killed, the kernel ends all that runs there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.parallel.jobs import ROOT, clean_environment

LOGIN, NODES = "login", ("n1", "n2")
PROGRAMS = ("slurmctld", "slurmd", "srun", "salloc", "sbatch", "scancel", "unshare", "nsenter")
UNSHARE = ("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork")
START_SECONDS = 20.0
CONFIGURATION = """\
ClusterName=hvdlite
SlurmctldHost=login(127.0.0.1)
SlurmctldPort={login}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
KillWait=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
NodeName=n1 NodeAddr=127.0.0.1 Port={n1} CPUs=4
NodeName=n2 NodeAddr=127.0.0.1 Port={n2} CPUs=4
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
# $1: the host's folder, $2: its name, then paths that stay visible, "--" and the daemon.
HOST = """\
set -e
mount --make-rprivate /
hostname "$2"
mount --bind "$1/../hosts" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs "$1"
shift 2
for path in $KEPT; do
    case $path in
    /tmp/*) mkdir -p "$HERE${path#/tmp}"; mount --rbind "$path" "$HERE${path#/tmp}" ;;
    esac
done
mount --rbind "$HERE" /tmp
chmod 1777 /tmp
exec "$@"
"""


def missing() -> str:
    """Return why there can be no cluster here; empty where there can be one."""
    if os.geteuid() != 0:
        return "a Slurm cluster of namespaces needs root"
    absent = [name for name in PROGRAMS if not shutil.which(name)]
    if absent:
        return f"Slurm is not installed: {', '.join(absent)}"
    made = subprocess.run([*UNSHARE, "true"], capture_output=True, check=False)
    return "" if made.returncode == 0 else "namespaces may not be made here"


@dataclass
class Cluster:
    """A running cluster. `folder` is shared by all its hosts."""

    folder: Path
    hosts: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    # -- for tests

    def run(
        self, *command: str, host: str = LOGIN, timeout: float = 60, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end."""
        with self.start(*command, host=host, **variables) as process:
            out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    @contextlib.contextmanager
    def start(
        self, *command: str, host: str = LOGIN, **variables: str
    ) -> Iterator[subprocess.Popen[str]]:
        """Start a command on a host; it is killed at the end."""
        process = subprocess.Popen(
            [*self._enter(host), *command],
            cwd=self.folder,
            env=self.environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def environment(self, **variables: str) -> dict[str, str]:
        """Return what a user has in a shell of the login host, without a trace of other jobs."""
        plain = {k: v for k, v in clean_environment().items() if not k.startswith("SLURM")}
        path = os.pathsep.join((str(Path(sys.executable).parent), plain.get("PATH", os.defpath)))
        ours = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}
        return {**plain, "PYTHONPATH": str(ROOT), "TMPDIR": "/tmp", **ours, **variables}

    def write(self, name: str, text: str) -> str:
        """Write a file that all hosts see; returns its path."""
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    def queue(self) -> list[str]:
        """Return the jobs that have not ended."""
        return self.run("squeue", "-h", "-o", "%i %T").stdout.splitlines()

    def end_jobs(self) -> None:
        """Cancel all jobs, and wait until none is left."""
        if self.queue():
            self.run("scancel", "--full", "--state=RUNNING")
            self.run("scancel", "--state=PENDING")
            _wait(lambda: not self.queue(), "the end of all jobs")

    def processes(self, mark: str) -> list[str]:
        """Return the command lines of the processes on all hosts whose environment has `mark`."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                    found.append((path / "cmdline").read_text().replace("\0", " "))
        return found

    # -- up and down

    def up(self) -> None:
        """Start the daemons, and wait until both nodes are idle."""
        ports = dict(zip((LOGIN, *NODES), _free_ports(3), strict=True))
        text = CONFIGURATION.format(folder=self.folder, **ports)
        (self.folder / "slurm.conf").write_text(text)
        names = " ".join((LOGIN, *NODES))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost {names}\n::1 localhost\n")
        (self.folder / "state").mkdir()
        self._start_host(LOGIN, "slurmctld", "-D")
        for node in NODES:
            self._start_host(node, "slurmd", "-D", "-N", node)
        _wait(self._idle, "two idle nodes", self._logs)

    def _start_host(self, name: str, *daemon: str) -> None:
        here = self.folder / name
        here.mkdir()
        kept = (str(self.folder), str(ROOT), sys.prefix, sys.base_prefix)
        log = (self.folder / f"{name}.out").open("wb")
        self.hosts[name] = subprocess.Popen(
            [*UNSHARE, "--kill-child", "--mount-proc",
             "sh", "-c", HOST, "sh", str(here), name, *daemon],
            env=self.environment(KEPT=" ".join(kept), HERE=str(here)),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        log.close()

    def _enter(self, host: str) -> list[str]:
        children = Path(f"/proc/{self.hosts[host].pid}/task/{self.hosts[host].pid}/children")
        first = children.read_text().split()[0]  # the first process of the host
        return ["nsenter", "--target", first, "--mount", "--uts", "--ipc", "--pid",
                f"--wd={self.folder}"]  # fmt: skip

    def _idle(self) -> bool:
        done = self.run("sinfo", "-h", "-N", "-o", "%N %T")
        return done.stdout.split() == ["n1", "idle", "n2", "idle"]

    def _logs(self) -> str:
        files = sorted((*self.folder.glob("*.out"), *self.folder.glob("*.log")))
        return "\n".join(f"-- {path.name}\n{path.read_text()[-2000:]}" for path in files)

    def down(self) -> None:
        """End the daemons, and with them all that runs on their hosts."""
        with contextlib.suppress(Exception):
            self.end_jobs()
        for process in self.hosts.values():
            process.kill()
            process.wait()


def _wait(condition: object, what: str, explain: object = str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {START_SECONDS:g} s for {what}\n{explain()}")  # type: ignore[operator]
        time.sleep(0.05)


def _free_ports(number: int) -> Sequence[int]:
    """Return ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
