"""Training with PyTorch on real ranks: data loaders, twice in one process, as one process would."""

from __future__ import annotations

import sys

import pytest

from tests.parallel.jobs import MPI, TCP, ranks, run_command

pytest.importorskip("torch", reason="the extra 'torch' is not installed")

PRELOAD = ("tests.lean", "hvdlite.torch")
pytestmark = pytest.mark.usefixtures("transport")


@pytest.mark.parametrize(
    ("size", "method", "transport"),
    [
        (1, "fork", TCP),
        (3, "fork", TCP),
        pytest.param(2, "spawn", TCP, marks=pytest.mark.soak),
        (1, "fork", MPI),
        (3, "fork", MPI),
        (2, "spawn", MPI),  # New processes inherit what mpirun has told their parents.
    ],
    indirect=["transport"],
)
def test_training(size: int, method: str) -> None:
    command = ranks(
        size, sys.executable, "-m", "tests.parallel.worker_torch", method, preload=PRELOAD
    )
    result = run_command(command, timeout=200)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("is content") == size, result.stdout
