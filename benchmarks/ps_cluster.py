"""Clusters of processes, each of which is a `ps_member.py`, and the times of their steps."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex

from jobs import environment
from measuring import Spread, duration

HERE = Path(__file__).parent
MEMBER = HERE / "ps_member.py"
WARM_STEPS = 3
JOB_SECONDS = 180  # Nine processes import PyTorch for a minute on a busy machine.
Rows = list[tuple[str, str]]


@dataclass
class Job:
    """A cluster, and what its workers do."""

    servers: int = 1
    workers: int = 2
    sizes: str = "resnet50"
    mode: str = "sync"
    staleness: int | None = None
    steps: int = 15
    seconds: float = 0.0  # Of modes in which workers do not wait; 0: all steps.
    slow: float = 0.0
    compute: float = 0.0
    backward: float = 0.0  # Seconds of a backward before each step; 0: gradients are given.
    way: str = "memory"
    wide: bool = True  # The server's optimizer uses all cores.
    variables: Mapping[str, str] = field(default_factory=dict)
    prefixes: Sequence[Sequence[str]] = ()  # Of the commands: scheduler, servers, workers.
    address: str = "127.0.0.1"


class Cluster:
    """The processes of a job."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job, self.folder = job, folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._environ = environment() | {
            "HVDLITE_SCHEDULER": f"{job.address}:{port}", "HVDLITE_NUM_SERVERS": str(job.servers),
            "HVDLITE_NUM_WORKERS": str(job.workers), "HVDLITE_PS_TOKEN": token_hex(16),
            **job.variables,
        }  # fmt: skip
        kept = (
            "sizes", "mode", "staleness", "steps", "seconds", "slow", "compute", "backward", "way",
            "wide",
        )  # fmt: skip
        words = {"folder": str(folder), **{name: getattr(job, name) for name in kept}}
        self._command = [sys.executable, str(MEMBER), json.dumps(words)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str, number: int) -> None:
        """Start a process, or start it again."""
        place = {"scheduler": 0, "server": 1, "worker": 1 + self._job.servers}[role] + number
        prefix = self._job.prefixes[place] if self._job.prefixes else ()
        environ = {**self._environ, "HVDLITE_ROLE": role, "HVDLITE_NODE_ID": f"{role}{number}"}
        command = [*prefix, *self._command]
        self.processes[f"{role}{number}"] = subprocess.Popen(command, env=environ)

    def wait(self) -> list[list[list[float]]]:
        """Return the times of all workers' steps when all processes have ended."""
        for name, process in self.processes.items():
            if code := process.wait(JOB_SECONDS):
                raise SystemExit(f"{name} ended with {code}")
        files = [self.folder / f"worker{number}.json" for number in range(self._job.workers)]
        return [json.loads(file.read_text()) for file in files]


@contextmanager
def running(job: Job, folder: Path) -> Iterator[Cluster]:
    """Start all processes of a job; none is left at the end."""
    cluster = Cluster(job, folder)
    try:
        for role, count in (("scheduler", 1), ("server", job.servers), ("worker", job.workers)):
            for number in range(count):
                cluster.start(role, number)
        yield cluster
    finally:
        for process in cluster.processes.values():
            process.kill()
            process.wait()


def times_of(job: Job) -> list[list[list[float]]]:
    """Run a job; return when the steps of each worker began and ended."""
    with tempfile.TemporaryDirectory() as folder, running(job, Path(folder)) as cluster:
        return cluster.wait()


def step_seconds(job: Job) -> list[float]:
    """Run a job in sync; return the seconds of each step on the slowest worker."""
    steps = zip(*times_of(job), strict=True)
    return [max(end - begin for begin, end in step) for step in steps][WARM_STEPS:]


def spread_of(seconds: Sequence[float]) -> str:
    """Return the median, and the quartiles in brackets."""
    found = Spread.quartiles(seconds)
    return f"{duration(found.median)} ({duration(found.low)} to {duration(found.high)})"
