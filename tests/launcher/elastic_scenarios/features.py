"""The problem of `train_features`, and the same training in one process by plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

SAMPLES, FEATURES, HIDDEN, BATCH, RATE, EPOCHS = 40, 3, 4, 2, 0.05, 2
INITIAL_SCALE, GROWTH_INTERVAL = 16.0, 3
OVERFLOW_STEPS = (2, 9)  # Rank 0 has an infinite loss in them: nobody may change weights.


@functools.cache
def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples and targets, the same ones in all processes."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(SAMPLES, FEATURES, generator=generator)
    return samples, samples @ torch.tensor([1.0, -2.0, 0.5])


def make_model(norm: Any) -> torch.nn.Sequential:
    """Return the model with its first weights; `norm` is a kind of batch normalization."""
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN), norm(HIDDEN), torch.nn.Linear(HIDDEN, 1)
    )


def train_alone(history: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor, list[float], float]:
    """Return weights, running means, and the scale after each step, of one process in float64.

    Also returned: the length of the way that the weights went.
    """
    model = make_model(torch.nn.BatchNorm1d).double()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    samples, targets = data()
    scale, good, scales, way = INITIAL_SCALE, 0, [], 0.0
    for number, (_, everywhere, _) in enumerate(history):
        batch = [index for indices in everywhere for index in indices]
        optimizer.zero_grad()
        outputs = model(samples[batch].double()).reshape(-1)
        (outputs - targets[batch].double()).square().mean().backward()
        if number in OVERFLOW_STEPS:
            scale, good = scale / 2, 0
        else:
            before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
            optimizer.step()
            after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
            way += float((after - before).norm())
            good += 1
            if good == GROWTH_INTERVAL:
                scale, good = scale * 2, 0
        scales.append(scale)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return weights, model[1].running_mean, scales, way
