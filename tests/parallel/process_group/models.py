"""Models and data of the features, and training by one process as the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

ROWS, FEATURES, CLASSES = 8, 16, 4
STEPS = 3


def make_model() -> nn.Sequential:
    """The same model on every rank."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES)
    )


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(50 + step)
    return (
        torch.randn(ROWS, FEATURES, generator=generator),
        torch.randint(0, CLASSES, (ROWS,), generator=generator),
    )


def part(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of one rank."""
    inputs, targets = make_batch(step)
    return inputs[rank::size], targets[rank::size]


def loss_of(model: Callable[..., torch.Tensor], batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Sequence[torch.Tensor]],
) -> None:
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def trained_alone(steps: int = STEPS) -> nn.Sequential:
    """The model after training on whole batches in this process alone."""
    model = make_model()
    train(model, adam(model), [make_batch(step) for step in range(steps)])
    return model


def close(found: nn.Module, expected: nn.Module, tolerance: float = 1e-6) -> None:
    """Compare parameters in order; those of DTensors are put together by all ranks."""
    pairs = list(zip(found.parameters(), expected.parameters(), strict=True))
    for mine, theirs in pairs:
        whole = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        error = (whole.detach() - theirs.detach()).abs().max().item()
        assert error <= tolerance, error
