"""What ranks run in the tests of Ray and Spark, and what must come out of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

ROWS, COLUMNS = 8, 3  # rows of one rank's data


def reduce(start: int) -> tuple[int, int, int, int, list[float]]:
    """Return the rank's place, and the sum over all ranks of ``start + rank``."""
    import hvdlite.numpy as hvd

    hvd.init()
    place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
    total = hvd.allreduce(np.full(4, start + hvd.rank(), np.float64), op=hvd.Sum, name="x")
    hvd.shutdown()
    return (*place, total.tolist())


def reduced(size: int, start: int) -> list[tuple[int, int, int, int, list[float]]]:
    """Return what `reduce` returns on `size` ranks of one host."""
    total = float(sum(start + rank for rank in range(size)))
    return [(rank, size, rank, size, [total] * 4) for rank in range(size)]


def place() -> dict[str, str]:
    """Return the variables that name the rank."""
    return {
        name: text
        for name, text in os.environ.items()
        if name.endswith(("_RANK", "_SIZE")) and name.startswith(("HVDLITE_", "HOROVOD_"))
    }


def wait_for_others() -> None:
    """Fail on rank 1, and wait for it on the others."""
    import hvdlite.numpy as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise KeyError("mine")
    hvd.allreduce(np.ones(3), name="never")


def lose_a_rank() -> None:
    """Let rank 1 end without a word, and the others wait for it."""
    import hvdlite.numpy as hvd

    hvd.init()
    if hvd.rank() == 1:
        os._exit(9)
    hvd.allreduce(np.ones(3), name="never")


def train(steps: int) -> list[float]:
    """Return the weights after `steps` steps on this rank's part of the data."""
    import torch

    import hvdlite.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())  # the ranks begin with other weights, and take those of rank 0
    model = _model(torch)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    weights = _fit(torch, model, optimizer, [hvd.rank()], steps)
    hvd.shutdown()
    return weights


def trained(size: int, steps: int) -> list[float]:
    """Return the weights that one process without hvdlite gets on the data of `size` ranks."""
    import torch

    torch.manual_seed(0)
    model = _model(torch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return _fit(torch, model, optimizer, range(size), steps)


def _model(torch: Any) -> Any:
    return torch.nn.Sequential(
        torch.nn.Linear(COLUMNS, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    ).double()


def _fit(torch: Any, model: Any, optimizer: Any, parts: Sequence[int], steps: int) -> list[float]:
    generators = [np.random.default_rng(part) for part in parts]
    for _ in range(steps):
        x = torch.from_numpy(np.concatenate([g.normal(size=(ROWS, COLUMNS)) for g in generators]))
        optimizer.zero_grad()
        ((model(x).squeeze() - x.sum(1)) ** 2).mean().backward()
        optimizer.step()
    return [float(value) for each in model.parameters() for value in each.detach().flatten()]
