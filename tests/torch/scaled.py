"""Models with a number for each tensor, and what the engine makes of their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.common.requests.entries import SegmentRun
from hvdlite.common.runtime.current import current
from tests.resnet50 import PARAMETERS

Runs = list[list[str]]
SIZE = 2  # ranks that most tests of segments have


class Watch:
    """What the engine of this rank reduces, until asked."""

    def __init__(self) -> None:
        self._runs: list[SegmentRun] = []
        current().engine.observe(self._runs.append)

    def take(self) -> Runs:
        """The names of the gradients of each reduction since the last call."""
        runs = [run for run in self._runs if run.collective == "allreduce"]
        self._runs.clear()
        names = [[name.removeprefix("allreduce.") for name in run.names] for run in runs]
        return [run for run in names if not run[0].startswith(("trainable_", "segmentation."))]


class Scaled(nn.Module):
    """One number for each of the tensors of a big model, in the same order, with its names."""

    def __init__(self, names: list[str], sizes: list[int]) -> None:
        super().__init__()
        self.named = {
            name: nn.Parameter(torch.full((size,), 0.5))
            for name, size in zip(names, sizes, strict=True)
        }

    def forward(self, factor: float) -> torch.Tensor:
        total = torch.zeros(())
        for number, parameter in enumerate(self.named.values()):
            total = total + parameter.sum() * (number + 1) * factor
        return total


def resnet(share: float = 0.01) -> Scaled:
    """The parameters of ResNet-50, each with a hundredth of its elements."""
    sizes = [max(1, round(share * torch.Size(shape).numel())) for _, shape in PARAMETERS]
    return Scaled([name for name, _ in PARAMETERS], sizes)


def step(model: Scaled, optimizer: Any, rank: int) -> None:
    optimizer.zero_grad()
    model(float(rank + 1)).backward()
    optimizer.step()


def small() -> Scaled:
    return Scaled(["a.weight", "a.bias", "b.weight", "b.bias"], [4, 2, 4, 2])


def distributed(model: Scaled, **options: Any) -> Any:
    inner = torch.optim.SGD(list(model.named.values()), lr=1.0)
    return hvd.DistributedOptimizer(inner, list(model.named.items()), **options)


def check(model: Scaled) -> None:
    """One step of SGD with rate 1 from 0.5, with the mean of the factors 1 and 2."""
    for number, parameter in enumerate(model.named.values()):
        torch.testing.assert_close(parameter, torch.full_like(parameter, 0.5 - 1.5 * (number + 1)))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.never, self.table = nn.Linear(2, 2), nn.Embedding(5, 2, sparse=True)

    def forward(self, second: bool) -> torch.Tensor:
        output = self.first(torch.ones(2)) + self.table(torch.tensor(3))
        return (self.second(output) if second else output).sum()
