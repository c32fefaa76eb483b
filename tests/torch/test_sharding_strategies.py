"""Every strategy of each operator on ranks as threads equals one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hvdlite.common.layouts.operators import candidates
from hvdlite.torch import sharding
from tests.torch.sharded_ranks import Mesh, check_against_one_process

N = 24  # All numbers of ranks divide it.
ALWAYS, MORE = [4], [2, 3, 6, 8]  # Other files have the others, with fewer strategies.

pytestmark = pytest.mark.usefixtures("float64")


class Part(nn.Module):
    """A function of some tensors and of a layer."""

    def __init__(self, function: Callable[..., Any], layer: nn.Module | None) -> None:
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs) if self.layer is None else self.function(self.layer, *inputs)


def applied(layer: nn.Module, *inputs: Any) -> Any:
    return layer(*inputs)


def attention(causal: bool) -> Any:
    return lambda x: functional.scaled_dot_product_attention(x, x.tanh(), x * 2, is_causal=causal)


def _x(*shape: int) -> Any:
    return torch.randn(shape or (N, N, 6))


def _words(*shape: int) -> Any:
    return torch.randint(N, shape)


OPERATORS: dict[str, Callable[[], tuple[Any, nn.Module | None, list[Any]]]] = {
    "linear": lambda: (applied, nn.Linear(N, 2 * N), [_x(N, 3, N)]),
    "matmul": lambda: (lambda x, y: x @ y.mT, None, [_x(N, N), _x(N, N)]),
    "batched matmul": lambda: (lambda x, y: x @ y.mT, None, [_x(N, N, 4), _x(N, N, 4)]),
    "einsum": lambda: (lambda x, y: torch.einsum("ab,ac->bc", x, y), None, [_x(N, N)] * 2),
    "baddbmm": lambda: (lambda x: torch.baddbmm(x, x, x, alpha=0.1), None, [_x(N, 6, 6)]),
    "tied embedding": lambda: (
        lambda layer, words: layer(words) @ layer.weight.t(), nn.Embedding(N, N), [_words(N, 3)],
    ),
    "layer norm": lambda: (applied, nn.LayerNorm(6), [_x()]),
    "rms norm": lambda: (applied, nn.RMSNorm(6), [_x()]),
    "group norm": lambda: (applied, nn.GroupNorm(N, 2 * N), [_x(N, 2 * N, 3)]),
    "batch norm": lambda: (applied, nn.BatchNorm1d(N), [_x()]),
    "instance norm": lambda: (applied, nn.InstanceNorm1d(N, affine=True), [_x()]),
    "activations": lambda: (lambda x: functional.gelu(x) * x.sigmoid(), None, [_x()]),
    "broadcasting": lambda: (lambda x, y: x + y[:, None] * y[:, :1, None], None, [_x(), _x(N, 6)]),
    "where": lambda: (lambda x, y: torch.where(x > y, x, y * 2), None, [_x(), _x()]),
    "views": lambda: (lambda x: x.view(N, 4, 6, 6).transpose(1, 3).flatten(2) * 2, None, [_x()]),
    "split and cat": lambda: (lambda x: torch.cat(x.split([2, 4], -1)[::-1], -1), None, [_x()]),
    "stack and unbind": lambda: (lambda x: torch.stack(x.unbind(2)[:3], 1) * 2, None, [_x()]),
    "expand": lambda: (lambda x: x[:, :, None].expand(N, N, 4, 6) * 2, None, [_x()]),
    "attention": lambda: (attention(False), None, [_x(N, N, N, 2)]),
    "causal attention": lambda: (attention(True), None, [_x(N, N, N, 2)]),
    "softmax": lambda: (lambda x: x.softmax(-1) + x.log_softmax(1), None, [_x()]),
    "reductions": lambda: (
        lambda x: x.sum(1) + x.mean(1) + x.amax(1) + x.var(1) + x.logsumexp(1), None, [_x()],
    ),
    "along a dimension": lambda: (
        lambda x: x.cumsum(1).flip(1) + x.sort(1)[0] + x.topk(3, 1)[0].sum(1, keepdim=True)
        + x.max(1)[0][:, None] + x.argmax(1)[:, None], None, [_x()],
    ),
    "indices": lambda: (
        lambda x, at: x.gather(1, at) + x[:, at[0, 0]].sum(1)[:, None, :], None,
        [_x(), _words(N, N, 6)],
    ),
    "cross entropy": lambda: (functional.cross_entropy, None, [_x(N, N), _words(N)]),
    "mean of pairs": lambda: (functional.mse_loss, None, [_x(), _x()]),
    "convolution": lambda: (applied, nn.Conv2d(N, N, 3, padding=1), [_x(N, N, 4, 4)]),
    "groups": lambda: (applied, nn.Conv1d(N, 2 * N, 3, groups=N), [_x(N, N, 5)]),
    "transposed convolution": lambda: (applied, nn.ConvTranspose1d(N, N, 2), [_x(N, N, 3)]),
    "pooling": lambda: (lambda x: functional.max_pool2d(x, 2), None, [_x(N, N, 4, 4)]),
}  # fmt: skip


@pytest.mark.parametrize(
    "ranks", [*ALWAYS, *(pytest.param(n, marks=pytest.mark.soak) for n in MORE)]
)
@pytest.mark.parametrize("name", OPERATORS)
def test_every_strategy(name: str, ranks: int) -> None:
    """All operators of a part have one at once, and neighbours mostly others."""
    function, layer, inputs = OPERATORS[name]()
    part = Part(function, layer)
    found = sharding.plan(part, tuple(inputs), mesh=Mesh((ranks,))).found
    assert found is not None
    every = {
        operator.name: [operator.strategy(cuts) for cuts in candidates(operator, ranks, False)]
        for operator in found.operators
    }
    most = max(map(len, every.values()))
    assert most > 1, "some can be cut"
    for number in range(most):
        given = {
            each: strategies[(number + place) % len(strategies)]
            for place, (each, strategies) in enumerate(every.items())
        }
        check_against_one_process(part, inputs, given, ranks)
