"""Gradients in buckets that are prepared once, with the values that they must have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.common.runtime.current import current

Tensor = torch.Tensor


def values(rank: int, step: int, index: int, shape: tuple[int, ...]) -> Tensor:
    """Whole numbers that differ between ranks, steps and gradients."""
    start = 1000 * step + 100 * index + 10 * rank
    return torch.arange(start, start + max(1, torch.Size(shape).numel())).reshape(shape).float()


class Gradients:
    """Parameters whose gradients a test sets by hand, and their optimizer."""

    def __init__(self, *shapes: tuple[int, ...], **options: Any) -> None:
        self.parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        named = [(f"p{index}", each) for index, each in enumerate(self.parameters)]
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.parameters, lr=1.0), named, **options
        )

    def set(self, step: int, change: Callable[[Tensor], Tensor] = lambda each: each) -> None:
        for index, parameter in enumerate(self.parameters):
            parameter.grad = change(values(hvd.rank(), step, index, tuple(parameter.shape)))

    def check(self, step: int, size: int = 2, tolerance: float = 0.0) -> None:
        """Compare every gradient with the mean that this process computes of all ranks' values."""
        for index, parameter in enumerate(self.parameters):
            shape = tuple(parameter.shape)
            each = [values(rank, step, index, shape) for rank in range(size)]
            assert parameter.grad is not None
            torch.testing.assert_close(
                parameter.grad, torch.stack(each).mean(0), rtol=tolerance, atol=0
            )

    def step(self, step: int, **check: Any) -> None:
        self.optimizer.synchronize()
        self.check(step, **check)
        with self.optimizer.skip_synchronize():
            self.optimizer.step()


def buckets() -> list[Any]:
    return [*current().buckets.values()]


def gradient_options(**changes: Any) -> Any:
    from hvdlite.common.api.options import reduction

    return reduction(None, hvd.Sum, 1.0, 1.0, hvd.global_process_set)._replace(**changes)
