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
        # New processes inherit what mpirun has told their parents.
        (2, ("fork", "spawn"), MPI),
    ],
    indirect=["transport"],
)
def test_training(size: int, methods: tuple[str, ...]) -> None:
    words = (sys.executable, "-m", "tests.parallel.worker_torch", *methods)
    command = ranks(size, *words, preload=PRELOAD)
    result = run_command(command, timeout=200)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("is content") == size, result.stdout


UNEVEN = """
import torch, hvdlite.torch as hvd
hvd.init()
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for _ in range(3 - hvd.rank()):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
hvd.allreduce(torch.ones(1), name="loss")
"""


def test_ranks_with_different_numbers_of_batches_are_told_of_join_and_where_they_are() -> None:
    command = ranks(2, sys.executable, "-c", UNEVEN, preload=PRELOAD)
    result = run_command(command, HVDLITE_STALL_SHUTDOWN_TIME_SECONDS="3")
    assert result.returncode != 0
    _, end, error = result.stdout.partition("HorovodInternalError: stalled for up to 3 s: 2 ranks")
    assert end and "docs/howto/uneven_data.md" in error, result.stdout
    assert "rank 0 waits for 'allreduce.weight'" in error or "'allreduce.bias'" in error, error
    assert "rank 1 waits for 'allreduce.loss'" in error, error
