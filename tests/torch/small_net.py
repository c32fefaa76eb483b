"""A small network, its data, and the oracle of its reduced gradients."""

from __future__ import annotations

import copy

import torch
from torch import nn

SIZE = 3
Tensor = torch.Tensor

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def net() -> nn.Sequential:
    """A new copy: torch has one random generator for all threads."""
    return copy.deepcopy(NET)


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def data(rank: int, step: int = 0) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return model(data(rank, step)).square().sum()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def reduced_gradients(op: str = "Average", size: int = SIZE, passes: int = 1) -> Tensor:
    """The oracle: every rank's gradients, computed in one process and combined."""
    rows = []
    for rank in range(size):
        model = net()
        for step in range(passes):
            loss_of(model, rank, step).backward()
        rows.append(gradients(model))
    stacked = torch.stack(rows)
    if op == "Average":
        return stacked.mean(0)
    return stacked.sum(0) if op == "Sum" else stacked.amax(0) if op == "Max" else stacked.amin(0)
