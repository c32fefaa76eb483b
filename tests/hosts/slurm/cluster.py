"""A Slurm cluster of simulated hosts: nodea for logins, nodeb and nodec as the nodes of jobs.

Slurm's controller runs on the login host, which gets no rank. There is no systemd and no munge:
every process may say who it is, as nobody else can reach these hosts.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.hosts.lab import (
    INSIDE,
    ROOT,
    SHARED,
    CannotBuildError,
    Lab,
    Running,
    address,
    environment,
    program,
)

LOGIN, NODES = "nodea", ("nodeb", "nodec")
PROGRAMS = ("slurmctld", "slurmd", "srun", "salloc", "sbatch", "scancel", "sinfo", "squeue")
WAIT_SECONDS = 20.0
FOLDER = INSIDE / "slurm"
CONFIGURATION = """\
ClusterName=hvdlite
SlurmctldHost={login}({login_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
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
"""
NODE = "NodeName={name} NodeAddr={address} CPUs=4\n"
PARTITION = "PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP\n"


@dataclass
class Cluster:
    """A running cluster."""

    lab: Lab
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)
    own: set[int] = field(default_factory=set)  # the processes of Slurm itself

    # -- for tests

    def run(
        self, *command: str, host: str = LOGIN, timeout: float = 40, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end; when `timeout` seconds are over, it is an error."""
        with self.start(*command, host=host, **variables) as running:
            try:
                return running.finish(timeout)
            except subprocess.TimeoutExpired as late:
                said = b"".join(filter(None, (late.stdout, late.stderr))).decode()
                raise AssertionError(f"{command} did not end in {timeout} s:\n{said}") from None

    def start(
        self, *command: str, host: str = LOGIN, **variables: str
    ) -> contextlib.AbstractContextManager[Running]:
        """Start a command on a host; it is killed at the end."""
        return self.lab.start(host, *command, **self._environment(variables))

    def _environment(self, variables: dict[str, str]) -> dict[str, str]:
        ours = {
            "SLURM_CONF": str(FOLDER / "slurm.conf"),
            "PYTHONPATH": str(ROOT),
            "HVDLITE_NATIVE": "off",  # each host would compile it
        }
        return {**ours, **variables}

    def read(self, name: str) -> str:
        """Return the text of a file that all hosts share; empty where there is none yet."""
        path = self.lab.folder / "shared" / name
        return path.read_text() if path.exists() else ""

    def batch(self, *flags: str, lines: str, output: str = "job.out") -> tuple[int, str]:
        """Run a batch script to its end; returns its exit code and what it has written."""
        (self.lab.folder / "shared" / output).unlink(missing_ok=True)
        script = self.lab.write("job.sh", f"#!/bin/sh\n{lines}\n")
        done = self.run("sbatch", "--parsable", *flags, f"--output={SHARED / output}", script)
        wait_until(lambda: not self.queue(), "the end of the job", lambda: self.read(output))
        said = self.run("scontrol", "show", "job", "--oneliner", done.stdout.strip()).stdout
        codes = re.findall(r"ExitCode=(\d+):", said)
        return max(map(int, codes)), self.read(output) + done.stderr

    def queue(self) -> list[str]:
        """Return the jobs that have not ended."""
        return self.run("squeue", "-h", "-o", "%i %T").stdout.splitlines()

    def forget_ended(self) -> list[str]:
        """Wait for jobs that are about to end; returns those that go on."""
        deadline = time.monotonic() + WAIT_SECONDS
        while jobs := self.queue():
            if time.monotonic() > deadline or any("COMPLETING" not in job for job in jobs):
                break
            time.sleep(0.05)
        return jobs

    def cancel(self) -> None:
        """Cancel all jobs, and wait until none is left."""
        if jobs := [line.split()[0] for line in self.queue()]:
            self.run("scancel", "--full", *jobs)
            wait_until(lambda: not self.queue(), "the end of all jobs", lambda: str(self.queue()))

    def left(self) -> dict[str, list[str]]:
        """Return the processes of jobs that run on the hosts."""
        found = {
            host: [text for pid, text in self.lab.processes(host).items() if pid not in self.own]
            for host in self.lab.nodes
        }
        return {host: texts for host, texts in found.items() if texts}

    # -- up and down

    def up(self) -> None:
        """Start the daemons, and wait until both nodes are idle."""
        folder = self.lab.folder / "slurm"
        (folder / "state").mkdir(parents=True)
        nodes = [NODE.format(name=name, address=address(name)) for name in NODES]
        text = CONFIGURATION.format(login=LOGIN, login_address=address(LOGIN), folder=FOLDER)
        partition = PARTITION.format(names=",".join(NODES))
        (folder / "slurm.conf").write_text("".join([text, *nodes, partition]))
        self._start_daemon(LOGIN, "slurmctld", "-D")
        for node in NODES:
            self._start_daemon(node, "slurmd", "-D", "-N", node)
        wait_until(self._idle, "two idle nodes", self._logs)
        self.own = {pid for host in self.lab.nodes for pid in self.lab.processes(host)}

    def _start_daemon(self, host: str, *command: str) -> None:
        with (self.lab.folder / "slurm" / f"{host}.log").open("wb") as log:
            self.daemons.append(subprocess.Popen(
                [*self.lab.enter(host), *command],
                env=environment(self._environment({})),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            ))  # fmt: skip

    def _idle(self) -> bool:
        done = self.run("sinfo", "-h", "-N", "-o", "%N %T")
        return done.stdout.split() == [word for node in NODES for word in (node, "idle")]

    def _logs(self) -> str:
        files = sorted((self.lab.folder / "slurm").glob("*.log"))
        return "\n".join(f"-- {path.name}\n{path.read_text()[-2000:]}" for path in files)

    def down(self) -> None:
        """Remove the hosts, and with them all that runs there."""
        self.lab.close()
        for daemon in self.daemons:
            daemon.wait()


@contextlib.contextmanager
def cluster(build: Callable[[], Lab]) -> Iterator[Cluster]:
    """Give a cluster that is up; raises `CannotBuildError` where there can be none."""
    if absent := [name for name in PROGRAMS if not program(name)]:
        raise CannotBuildError(f"Slurm is not installed: there is no {', '.join(absent)}")
    made = Cluster(build())
    try:
        made.up()
        yield made
    finally:
        made.down()


def wait_until(condition: Callable[[], bool], what: str, explain: Callable[[], str] = str) -> None:
    """Wait until `condition` is true; fails with `explain` after a while."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {WAIT_SECONDS:g} s for {what}\n{explain()}")
        time.sleep(0.05)
