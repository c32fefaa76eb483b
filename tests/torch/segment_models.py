"""Models whose gradients are cut into segments."""

from __future__ import annotations

import torch
from torch import nn

from tests.torch.scaled import Scaled

SIZE = 2


def check(model: Scaled) -> None:
    """One step of SGD with rate 1 from 0.5, with the mean of the factors 1 and 2."""
    for number, parameter in enumerate(model.named.values()):
        torch.testing.assert_close(parameter, torch.full_like(parameter, 0.5 - 1.5 * (number + 1)))


ORDER = ["b.bias", "b.weight", "a.bias", "a.weight"]


def sequential() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.never, self.table = nn.Linear(2, 2), nn.Embedding(5, 2, sparse=True)

    def forward(self, second: bool) -> torch.Tensor:
        output = self.first(torch.ones(2)) + self.table(torch.tensor(3))
        return (self.second(output) if second else output).sum()
