"""A sharded part of a model on real ranks equals one process, to 1e-5."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.parallel.jobs import ranks, run_command

pytest.importorskip("torch", reason="the extra 'torch' is not installed")


def run(size: int, worker: str, *words: object, timeout: float = 200) -> None:
    """Run a worker of this folder, of which each rank says that it is content."""
    module = f"tests.parallel.{worker}"
    preload = ("torch._dynamo", "hvdlite.torch.sharding", module)
    command = ranks(size, sys.executable, "-m", module, *map(str, words), preload=preload)
    result = run_command(command, timeout=timeout)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("is content") == size, result.stdout


def test_no_rank_holds_a_whole_model_to_load_it(tmp_path: Path) -> None:
    run(4, "worker_sharded_inference", tmp_path)


def test_a_part_that_is_compiled() -> None:
    run(2, "worker_sharding_compiled")


@pytest.mark.soak
def test_operators_data_fsdp_and_a_pipeline_together() -> None:
    """Losses and weights after 20 steps of 8 ranks are those of one process, to 1e-10."""
    pytest.importorskip("torch", "2.6", reason="FSDP2 shards what is a DTensor already")
    run(8, "worker_sharding_together", timeout=300)


def test_a_part_of_a_model_is_sharded_on_four_ranks(tmp_path: Path) -> None:
    run(4, "worker_sharding", tmp_path)
