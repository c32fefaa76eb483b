"""A rank that trains a model twice: by allreduce alone, and with some parameters by servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import hvdlite.torch as hvd
from hvdlite.torch import ps

STEPS = 12


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(24, 16), nn.Linear(16, 5))


def loss_of(net: nn.Module, step: int, rank: int) -> Tensor:
    made = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randint(50, (16, 3), generator=made)
    y = torch.randint(5, (16,), generator=made)
    return nn.functional.cross_entropy(net(x), y)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, clip: bool) -> dict[str, Tensor]:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, step, hvd.rank()).backward()
        if clip:  # As scripts for Horovod do; what servers step with is not reduced yet.
            optimizer.synchronize()  # type: ignore[attr-defined]
            torch.nn.utils.clip_grad_norm_(net[3].parameters(), 0.01)  # type: ignore[index]
            with optimizer.skip_synchronize():  # type: ignore[attr-defined]
                optimizer.step()
        else:
            optimizer.step()
    return net.state_dict()


def main(folder: Path, parameters: Sequence[str] | None, mark: bool, clip: bool) -> None:
    torch.set_num_threads(1)
    ps.init()
    both = model()
    if mark:
        ps.set_param_ps(both[0])  # type: ignore[index]
    optimizer = ps.DistributedOptimizer(
        torch.optim.SGD(both.parameters(), lr=0.1, momentum=0.9), both.named_parameters(),
        parameters=parameters,
    )  # fmt: skip
    mixed = train(both, optimizer, clip)
    alone = model()
    names = alone.named_parameters()
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    reduced = train(alone, hvd.DistributedOptimizer(sgd, names), clip)
    torch.save({"mixed": mixed, "reduced": reduced}, folder / f"worker{ps.rank()}.pt")
    ps.shutdown()
    hvd.shutdown()
