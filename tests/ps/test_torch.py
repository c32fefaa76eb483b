"""Clusters of real processes that train a network of PyTorch."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.ps.digits import accuracy, train_in_one
from tests.ps.processes import cluster
from tests.ps.scripts.torch_digits import main


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize(("name", "workers"), [("sgd", 2), ("adam", 2), ("adam", 3)])
def test_sync_is_bitwise_one_process(tmp_path: Path, name: str, workers: int) -> None:
    with cluster(tmp_path, 2, workers, main, tmp_path, "sync", None, name, 60) as job:
        assert not job.wait_for_all()
    wanted = train_in_one(name, workers, 60)
    assert all(same(job.weights(number), wanted) for number in range(workers))


def test_a_slow_worker_holds_nobody_up_in_async(tmp_path: Path) -> None:
    words = tmp_path, "async", None, "sgd", 300
    with cluster(tmp_path, 2, 2, main, *words, SLOW="0.003") as job:
        assert not job.wait_for_all()
    assert accuracy(job.weights(1)) > 0.93


def test_a_killed_worker_returns_and_the_run_is_bitwise_undisturbed(tmp_path: Path) -> None:
    with cluster(tmp_path, 2, 2, main, tmp_path, "sync", None, "sgd", 60, DIE="1:20") as job:
        assert job.wait("worker1") == -signal.SIGKILL
        job.start("worker", 1)
        assert not job.wait_for_all()
    assert all(same(job.weights(number), train_in_one("sgd", 2, 60)) for number in range(2))
