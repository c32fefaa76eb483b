"""Random networks with random strategies on ranks as threads equal one process, in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hvdlite.common.layouts.operators import candidates
from hvdlite.torch import sharding
from tests.torch.sharded_ranks import Mesh, check_against_one_process

RANKS = [2, 3, 4, 6, 8]
ALWAYS, ALL = 24, 500
LENGTHS = (12, 24, 48)
MOST_ELEMENTS = 40_000
Step = Callable[[Any], Any]

pytestmark = pytest.mark.usefixtures("float64")


class RandomGraph(nn.Module):
    """Steps, each of which takes a tensor, or two, that was made before, and makes a new one."""

    def __init__(self, seed: int, steps: int = 12) -> None:
        super().__init__()
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.layers = nn.ModuleList()
        self.shape = tuple(self.random.choice(LENGTHS) for _ in range(self.random.choice([2, 3])))
        self.steps: list[tuple[Step, int]] = []
        made = [torch.empty(self.shape)]
        while len(self.steps) < steps:
            # Mostly the newest, so that graphs are deep; sometimes an older one again.
            at = len(made) - 1 if self.random.random() < 0.7 else self.random.randrange(len(made))
            step = self._step(tuple(made[at].shape))
            result = step(made[at]).detach()
            if 2 <= result.ndim <= 4 and 0 < result.numel() <= MOST_ELEMENTS:
                self.steps.append((step, at))
                made.append(result)

    def forward(self, x: Any) -> Any:
        made = [x]
        for step, at in self.steps:
            made.append(step(made[at]))
        partners = [each for each in made[1:-1] if each.shape == made[-1].shape]
        found = made[-1]
        for each in partners:
            found = found + each
        return found, made[len(made) // 2]

    def _layer(self, layer: nn.Module) -> nn.Module:
        self.layers.append(layer)
        return layer

    def _step(self, shape: tuple[int, ...]) -> Step:
        pick = self.random.choice
        dim, last = self.random.randrange(len(shape)), shape[-1]
        other = (dim + 1) % len(shape)
        steps: list[Callable[[], Step]] = [
            lambda: self._layer(nn.Linear(last, pick(LENGTHS), bias=pick([True, False]))),
            lambda: self._layer(nn.LayerNorm(last)),
            lambda: pick([torch.tanh, torch.sigmoid, functional.gelu, functional.silu, torch.sin]),
            lambda: lambda x: x * 0.5 + x.mean(dim, keepdim=True),
            lambda: lambda x: x - x.amax(dim, keepdim=True),
            lambda: lambda x: x.transpose(dim, other) * 1.5,
            lambda: lambda x: x.softmax(dim),
            lambda: lambda x: x.log_softmax(dim) / 4,
            lambda: lambda x: x.cumsum(dim) / x.shape[dim],
            lambda: lambda x: x.sum(dim) / x.shape[dim],
            lambda: lambda x: x.var(dim, correction=0, keepdim=True) + x,
            lambda: (
                lambda x: torch.cat([x, x.flip(dim)], dim).narrow(dim, shape[dim] // 2, shape[dim])
            ),
            lambda: lambda x: x.unflatten(dim, (2, -1)) if shape[dim] % 2 == 0 else x,
            lambda: lambda x: x.flatten(0, 1) if len(shape) > 2 else x.sigmoid(),
            lambda: lambda x: x.flatten(-2) if len(shape) > 2 else x.sigmoid(),
            lambda: lambda x: (x @ x.transpose(-1, -2) / last).tanh(),
            lambda: lambda x: torch.stack([x, x.tanh()], dim).mean(dim),
            lambda: self._chosen(dim, shape),
            lambda: lambda x: sum(x.chunk(2, dim)) if shape[dim] % 2 == 0 else x,
            lambda: lambda x: x.unsqueeze(dim).expand(*shape[:dim], 2, *shape[dim:]) * 0.7,
            lambda: lambda x: functional.scaled_dot_product_attention(x, x.tanh(), x),
            lambda: lambda x: x[..., : last // 2] * x[..., last // 2 : last // 2 * 2],
            lambda: lambda x: torch.einsum("...ab->...ba", x).contiguous().tanh(),
        ]
        if len(shape) == 3:
            channels = shape[1]
            groups = pick([1, 1, 2, 4])
            if channels % groups == 0:
                made = nn.Conv1d(
                    channels, pick(LENGTHS), pick([1, 3]), padding="same", groups=groups
                )
                steps.append(lambda: self._layer(made))
            steps += [
                lambda: self._layer(nn.BatchNorm1d(channels, track_running_stats=False)),
                lambda: lambda x: functional.avg_pool1d(x, 2, ceil_mode=True),
            ]
        return pick(steps)()

    def _chosen(self, dim: int, shape: tuple[int, ...]) -> Step:
        places = torch.tensor([self.random.randrange(shape[dim]) for _ in range(shape[dim])])
        index: list[Any] = [slice(None)] * dim + [places]
        return lambda x: x[tuple(index)]


@pytest.mark.filterwarnings("ignore:.*runs on whole inputs")
@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=[] if n < ALWAYS else [pytest.mark.soak]) for n in range(ALL)],
)
def test_random_graphs(seed: int) -> None:
    chooser = random.Random(seed)
    ranks = chooser.choice(RANKS)
    model = RandomGraph(seed)
    x = torch.randn(model.shape, generator=torch.Generator().manual_seed(seed))
    found = sharding.plan(model, x, mesh=Mesh((ranks,))).found
    assert found is not None
    operators = [each for each in found.operators if each.lengths]
    strategies = {}
    for operator in chooser.sample(operators, min(5, len(operators))):
        cuts = chooser.choice(candidates(operator, ranks, chooser.random() < 0.5))
        strategies[operator.name] = operator.strategy(cuts)
    options: dict[str, Any] = {"fully_use_devices": chooser.random() < 0.7}
    options["search"] = chooser.choice(["propagation"] * 3 + ["dynamic_programming"])
    check_against_one_process(model, [x], strategies, ranks, tolerance=1e-9, **options)
