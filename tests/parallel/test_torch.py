"""Training with PyTorch on real ranks: data loaders, twice in one process, as one process would."""

from __future__ import annotations

import sys

import pytest

from tests.parallel.jobs import MPI, TCP, ranks, run_command

pytest.importorskip("torch", reason="the extra 'torch' is not installed")

PRELOAD = ("tests.lean", "hvdlite.torch")
pytestmark = pytest.mark.usefixtures("transport")


@pytest.mark.parametrize(
    ("size", "methods", "transport"),
    [
        pytest.param(1, ("fork", "fork"), TCP, marks=pytest.mark.soak),
        (3, ("fork", "fork"), TCP),
        pytest.param(2, ("spawn", "spawn"), TCP, marks=pytest.mark.soak),
        pytest.param(1, ("fork", "fork"), MPI, marks=pytest.mark.soak),
        (2, ("fork", "spawn"), MPI),  # New processes inherit what mpirun has told their parents.
    ],
    indirect=["transport"],
)
def test_training(size: int, methods: tuple[str, ...]) -> None:
    words = (sys.executable, "-m", "tests.parallel.worker_torch", *methods)
    command = ranks(size, *words, preload=PRELOAD)
    result = run_command(command, timeout=200)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("is content") == size, result.stdout
