"""Gradients of models on slices: which op gives those of one process with the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.data import slice_batch
from tests.ranks import run_ranks

Tensor = torch.Tensor
CUT = ((1, 1, 1, 4), (1, 1, 4))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, 1, 8, 16, generator=generator)
    return images, torch.randn(2, 8, 16, generator=generator)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 1, 3, padding=1))


def pixel_loss(model: nn.Module, images: Tensor, masks: Tensor, count: int | None = None) -> Tensor:
    """The mean over the pixels of the slice; with `count`, their sum divided by it."""
    squares = (model(images).squeeze(1) - masks).square()
    return squares.mean() if count is None else squares.sum() / count


def pooled_loss(model: nn.Module, images: Tensor, masks: Tensor, reduced: bool = False) -> Tensor:
    """A loss of features that are pooled over the whole image."""
    features = model(images).mean((2, 3))
    if reduced:
        features = hvd.allreduce(features, name="features")
    return (features - masks[:, 0, :1].detach()).square().mean()


def step(model: nn.Module, op: int, loss: Any) -> list[Tensor]:
    """The parameters after a step, whose optimizer reduces by `op`."""
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=op)
    loss(model).backward()
    optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def alone(loss: Any) -> list[Tensor]:
    """The parameters after a step of one process with the whole batch."""
    model = network()
    loss(model).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    return [parameter.detach() for parameter in model.parameters()]


RULES: dict[str, Any] = {
    # rule -> op, strategy, loss on a rank, loss of one process
    "a mean over the own slice, averaged": (
        hvd.Average, CUT, pixel_loss, pixel_loss,
    ),
    "one loss of features that were averaged over the slices, averaged": (
        hvd.Average, ((1, 1, 1, 4), (1, 1, 1)),
        lambda model, images, masks: pooled_loss(model, images, masks, True), pooled_loss,
    ),
    "equal gradients of the full batch, averaged": (
        hvd.Average, "full_batch", pixel_loss, pixel_loss,
    ),
    "parts of a sum divided by the global count, summed": (
        hvd.Sum, CUT,
        lambda model, images, masks: pixel_loss(model, images, masks, 2 * 8 * 16), pixel_loss,
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule: str) -> None:
    op, strategy, loss, whole_loss = RULES[rule]
    initial = network()
    wanted = alone(lambda model: whole_loss(model, *batch()))

    def main(rank: int) -> None:
        model = copy.deepcopy(initial)
        if strategy != "full_batch":
            hvd.SpatialConv2d.wrap(model, 3)
        found = step(model, op, lambda model: loss(model, *slice_batch(batch(), strategy)))
        for mine, theirs in zip(found, wanted, strict=True):
            assert (mine - theirs).abs().max().item() <= 1e-6

    run_ranks(4, main)
