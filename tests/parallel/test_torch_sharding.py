"""A sharded part of a model on real ranks equals one process, to 1e-5."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.parallel.jobs import Job, Jobs

pytest.importorskip("torch", reason="the extra 'torch' is not installed")

SIZES = {
    "worker_sharded_inference": 4, "worker_sharding": 4, "sharding_steps": 2, "sharding_calls": 2
}  # fmt: skip
COMPILED, TOGETHER = "worker_sharding_compiled", "worker_sharding_together"


def run_all(sizes: dict[str, int], folder: Path, seconds: float) -> Jobs:
    """Workers of this folder by one import of PyTorch, each with a folder of its own."""
    jobs = {}
    for name, size in sizes.items():
        (folder / name).mkdir()
        words = (sys.executable, "-m", f"tests.parallel.{name}", str(folder / name))
        jobs[name] = Job(size, words)
    modules = (f"tests.parallel.{name}" for name in sizes)
    return Jobs(jobs, ("torch._dynamo", "hvdlite.torch.sharding", *modules), seconds)


def check(jobs: Jobs, name: str, size: int) -> None:
    """Each rank says that it is content."""
    result = jobs.result(name)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("is content") == size, result.stdout


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return run_all(SIZES, tmp_path_factory.mktemp("jobs"), seconds=220)


@pytest.mark.parametrize("name", SIZES)
def test_each_rank_has_what_one_process_has(name: str, jobs: Jobs) -> None:
    check(jobs, name, SIZES[name])


def test_each_rank_has_what_one_process_has_compiled(tmp_path: Path) -> None:
    check(run_all({COMPILED: 2}, tmp_path, seconds=220), COMPILED, 2)


@pytest.mark.soak
def test_operators_data_fsdp_and_a_pipeline_together(tmp_path: Path) -> None:
    """Losses and weights after 20 steps of 8 ranks are those of one process, to 1e-10."""
    pytest.importorskip("torch", "2.6", reason="FSDP2 shards what is a DTensor already")
    check(run_all({TOGETHER: 8}, tmp_path, seconds=300), TOGETHER, 8)
