"""Clusters of real processes that train a network of PyTorch."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.ps.digits import accuracy, train_in_one

LIMIT_SECONDS = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """Processes started by hand, each with the environment of its role."""

    def __init__(self, folder: Path, servers: int, workers: int, *words: object) -> None:
        self.folder = folder
        self._variables = {
            "HVDLITE_SCHEDULER": f"127.0.0.1:{free_port()}", "HVDLITE_PS_TOKEN": "a secret",
            "HVDLITE_NUM_SERVERS": str(servers), "HVDLITE_NUM_WORKERS": str(workers),
        }  # fmt: skip
        self._words = [str(folder), *map(str, words)]
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, role: str, number: int = 0, **variables: str) -> None:
        name = f"{role}{number}"
        environ = os.environ | self._variables | variables
        environ |= {"HVDLITE_ROLE": role, "HVDLITE_NODE_ID": name}
        command = [sys.executable, "-m", "tests.ps.scripts.torch_digits", *self._words]
        self.processes[name] = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def wait(self, name: str) -> int:
        out, _ = self.processes[name].communicate(timeout=LIMIT_SECONDS)
        sys.stdout.write(out)
        return self.processes[name].returncode

    def weights(self, worker: int) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.folder / f"worker{worker}.pt")
        return found


@contextlib.contextmanager
def cluster(
    folder: Path, servers: int, workers: int, *words: object, **variables: str
) -> Iterator[Cluster]:
    made = Cluster(folder, servers, workers, *words)
    try:
        made.start("scheduler")
        for number in range(servers):
            made.start("server", number, **variables)
        for number in range(workers):
            made.start("worker", number, **variables)
        yield made
    finally:
        for process in made.processes.values():
            if process.poll() is None:
                process.kill()
                process.communicate()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize(("name", "workers"), [("sgd", 2), ("adam", 2), ("adam", 3)])
def test_sync_is_bitwise_one_process(tmp_path: Path, name: str, workers: int) -> None:
    with cluster(tmp_path, 2, workers, "sync", "-", name, 60) as job:
        assert {each: job.wait(each) for each in job.processes} == dict.fromkeys(job.processes, 0)
    wanted = train_in_one(name, workers, 60)
    assert all(same(job.weights(number), wanted) for number in range(workers))


def test_a_slow_worker_holds_nobody_up_in_async(tmp_path: Path) -> None:
    with cluster(tmp_path, 2, 2, "async", "-", "sgd", 300, SLOW="0.003") as job:
        assert {each: job.wait(each) for each in job.processes} == dict.fromkeys(job.processes, 0)
    assert accuracy(job.weights(1)) > 0.93


def test_a_killed_worker_returns_and_the_run_is_bitwise_undisturbed(tmp_path: Path) -> None:
    with cluster(tmp_path, 2, 2, "sync", "-", "sgd", 60, DIE="1:20") as job:
        assert job.wait("worker1") == -signal.SIGKILL
        job.start("worker", 1)
        assert {each: job.wait(each) for each in job.processes} == dict.fromkeys(job.processes, 0)
    assert all(same(job.weights(number), train_in_one("sgd", 2, 60)) for number in range(2))
