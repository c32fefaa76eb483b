"""Training with PyTorch on real ranks: data loaders, twice in one process, as one process would."""

from __future__ import annotations

import sys

import pytest

from tests.parallel.jobs import ranks, run_command

pytest.importorskip("torch", reason="the extra 'torch' is not installed")

pytestmark = pytest.mark.usefixtures("transport")


@pytest.mark.parametrize(("size", "method"), [(1, "fork"), (3, "fork"), (2, "spawn")])
def test_training(size: int, method: str) -> None:
    command = ranks(size, sys.executable, "-m", "tests.parallel.worker_torch", method)
    result = run_command(command, timeout=100)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("is content") == size, result.stdout
