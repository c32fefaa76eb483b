"""Checkpoints of DTensors on real ranks: saved by 4, loaded by 2, by 1 and without any group."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.parallel.jobs import ranks, run_command

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")
pytest.importorskip("safetensors", reason="the extra 'checkpoint' is not installed")


def run(size: int, call: str, folder: Path, rows: int) -> None:
    worker = (sys.executable, "-m", "tests.parallel.worker_checkpoint")
    words = (*worker, call, str(folder), str(rows))
    result = run_command(ranks(size, *words, preload=("torch._dynamo", *worker[-1:])), timeout=200)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("is content") == size, result.stdout


def test_dtensors_of_four_ranks_become_those_of_two_and_plain_tensors(tmp_path: Path) -> None:
    import hvdlite.torch as hvd

    run(4, "save", tmp_path, 2)
    expected = {"0.weight": torch.zeros(10, 6)}
    hvd.checkpoint.load(tmp_path / "whole", expected)
    plain = {"model": {"0.weight": torch.zeros(10, 6)}, "step": 0}
    hvd.checkpoint.load(tmp_path / "dcp", plain)
    assert torch.equal(plain["model"]["0.weight"], expected["0.weight"])
    assert plain["step"] == 11
    hvd.checkpoint.consolidate(tmp_path / "dcp", tmp_path / "one")
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "step": 0}
    for name in ("dcp", "one"):
        model[0].weight.data.zero_()
        hvd.checkpoint.load(tmp_path / name, state)
        assert torch.equal(model[0].weight, expected["0.weight"])
        assert state["optimizer"].state[model[0].weight]["exp_avg"].abs().sum() > 0
    run(2, "load", tmp_path, 2)
