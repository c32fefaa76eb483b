"""Training with an optimizer whose state is divided, and with one whose state is whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import hvdlite.torch as hvd
from tests.ranks import run_ranks

Tensor = torch.Tensor


class Counting(torch.optim.SGD):
    """Makes ever smaller steps, whose number it keeps where its `counts` says."""

    def __init__(self, params: Any, lr: float, counts: str) -> None:
        super().__init__(params, lr)
        self.counts, self.steps = counts, 0

    def _count(self) -> int:
        if self.counts == "itself":
            self.steps += 1
            return self.steps
        where: Any = self.state if self.counts == "state" else self.param_groups[-1]
        where["steps"] = where.get("steps", 0) + 1
        count: int = where["steps"]
        return count

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        count = self._count()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * (group["lr"] / count))


COUNTS = ("itself", "state", "group")
Make = Callable[[Any], torch.optim.Optimizer]
STEPS = 4
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
}
OPTIMIZERS |= {f"counts in {each}": partial(Counting, lr=0.05, counts=each) for each in COUNTS}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale


def network() -> nn.Module:
    torch.manual_seed(1)
    first: Any = nn.Conv2d(1, 3, 3)
    return nn.Sequential(
        first.to(memory_format=torch.channels_last),
        nn.Tanh(), nn.Flatten(), nn.Linear(3 * 16, 7), Scaled(), nn.Linear(7, 3, bias=False),
    )  # fmt: skip


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(4, 1, 6, 6, generator=generator),
         torch.randint(0, 3, (4,), generator=generator))
        for _ in range(STEPS)
    ]  # fmt: skip


def backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    torch.autograd.backward([loss])
    return loss


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other)


def both(size: int, make: Make, body: Callable[[int, nn.Module, Any], Any], **options: Any) -> None:
    """Run `body` with an optimizer that is sharded and with one that is not: the same weights."""

    def run(rank: int, shard_state: bool) -> Tensor:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            make(model.parameters()), model.named_parameters(), shard_state=shard_state, **options
        )
        body(rank, model, optimizer)
        return weights(model)

    results = []
    for sharded in (False, True):
        models = [network() for _ in range(size)]
        results.append(run_ranks(size, partial(run, shard_state=sharded)))
    plain, sharded_weights = results
    assert all(same(plain[0], each) for each in plain[1:] + sharded_weights)


def train(rank: int, model: nn.Module, optimizer: Any) -> None:
    for batch in batches(rank):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def states_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(states_equal(one[k], other[k]) for k in one)
    return bool(one == other)
