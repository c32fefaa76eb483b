"""Training on N ranks gives the weights that one process gives with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from tests.ranks import run_ranks

STEPS = 20
BATCH = 24
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 16), nn.Tanh(),
        nn.Linear(16, 10),
    )  # fmt: skip


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(BATCH, 1, 8, 8, generator=generator),
         torch.randint(0, 10, (BATCH,), generator=generator))
        for _ in range(STEPS)
    ]  # fmt: skip


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def train(model: nn.Module, optimizer: Any, data: list[tuple[Any, Any]]) -> torch.Tensor:
    for inputs, targets in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return weights(model)


def train_on_ranks(size: int, make: Make, **options: Any) -> list[torch.Tensor]:
    models = [make_model() for _ in range(size)]
    with torch.no_grad():  # broadcast_parameters has to repair this
        for parameter in models[-1].parameters():
            parameter.add_(1)
    data = batches()

    def main(rank: int) -> torch.Tensor:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            make(model.parameters()), named_parameters=model.named_parameters(), **options
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        share = BATCH // size
        mine = [(x[rank * share :][:share], y[rank * share :][:share]) for x, y in data]
        return train(model, optimizer, mine)

    return run_ranks(size, main)


@pytest.mark.parametrize(("name", "size"), [("sgd", 2), ("adam", 3), ("sgd", 4)])
def test_the_weights_are_those_of_one_process_with_the_whole_batch(name: str, size: int) -> None:
    make = OPTIMIZERS[name]
    model = make_model()
    alone = train(model, make(model.parameters()), batches())
    together = train_on_ranks(size, make)
    for other in together[1:]:
        assert torch.equal(together[0], other), "ranks hold different weights"
    error = (together[0] - alone).norm() / alone.norm()
    assert error < 1e-5
    assert (alone - weights(make_model())).norm() > 0.1, "nothing was learned"


def test_two_runs_give_the_same_bits() -> None:
    first, second = (train_on_ranks(3, OPTIMIZERS["adam"], groups=2) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
