"""A sharded part of a model on real ranks equals one process, to 1e-5."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.parallel.jobs import ranks, run_command

pytest.importorskip("torch", reason="the extra 'torch' is not installed")


def test_no_rank_holds_a_whole_model_to_load_it(tmp_path: Path) -> None:
    worker = "tests.parallel.worker_sharded_inference"
    result = run_command(ranks(4, sys.executable, "-m", worker, str(tmp_path)), timeout=200)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("is content") == 4, result.stdout


def test_a_part_that_is_compiled() -> None:
    worker = "tests.parallel.worker_sharding_compiled"
    result = run_command(ranks(2, sys.executable, "-m", worker), timeout=200)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("is content") == 2, result.stdout


@pytest.mark.soak
def test_operators_data_fsdp_and_a_pipeline_together() -> None:
    """Losses and weights after 20 steps of 8 ranks are those of one process, to 1e-10."""
    pytest.importorskip("torch", "2.6", reason="FSDP2 shards what is a DTensor already")
    worker = "tests.parallel.worker_sharding_together"
    result = run_command(ranks(8, sys.executable, "-m", worker), timeout=300)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("is content") == 8, result.stdout


def test_a_part_of_a_model_is_sharded_on_four_ranks(tmp_path: Path) -> None:
    command = ranks(4, sys.executable, "-m", "tests.parallel.worker_sharding", str(tmp_path))
    result = run_command(command, timeout=200)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("is content") == 4, result.stdout
