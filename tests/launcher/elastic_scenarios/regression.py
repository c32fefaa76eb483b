"""The problem that the scripts train with, and the same training by numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

SAMPLES, FEATURES, BATCH, RATE, MOMENTUM, SEED = 101, 3, 2, 0.02, 0.9, 5


def data() -> tuple[Any, Any]:
    """Return samples and targets, the same ones in all processes."""
    samples = np.random.default_rng(0).normal(size=(SAMPLES, FEATURES))
    return samples, samples @ np.array([1.0, -2.0, 0.5])


def train_alone(history: Sequence[Any]) -> Any:
    """Return the weights that batches lead to: epochs with the indices of all ranks."""
    samples, targets = data()
    weights, velocity = np.zeros(FEATURES), np.zeros(FEATURES)
    for _, everywhere in history:
        gradients = [
            2 * samples[batch].T @ (samples[batch] @ weights - targets[batch]) / len(batch)
            for batch in everywhere
        ]
        velocity = MOMENTUM * velocity + np.mean(gradients, axis=0)
        weights = weights - RATE * velocity
    return weights
