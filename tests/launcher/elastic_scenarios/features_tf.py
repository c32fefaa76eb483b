"""The problem of `train_features_tf`, and the same training in one process by numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

STEPS, ROWS, FEATURES, RATE = 9, 4, 3, 0.05
MOMENTUM, EPSILON = 0.9, 1e-3  # Of batch normalization: means are kept by the first.
Array = np.ndarray[Any, Any]


def batch_of(number: int, step: int) -> tuple[Array, Array]:
    """Return features and targets of a worker's step."""
    random = np.random.default_rng((number, step))
    features = random.normal(1, 2, (ROWS, FEATURES)).astype(np.float32)
    return features, (features @ [1.0, -2.0, 0.5]).astype(np.float32)


def make_layers(norm: Any) -> list[Any]:
    """Return batch normalization and a linear layer, with their first weights."""
    import tensorflow as tf

    layers = [norm(momentum=MOMENTUM, epsilon=EPSILON), tf.keras.layers.Dense(1)]
    for layer in layers:
        layer.build((None, FEATURES))
    layers[1].kernel.assign([[0.5], [-0.25], [1.0]])
    return layers


def train_alone(history: Sequence[Sequence[int]]) -> tuple[list[Array], float]:
    """Return gamma, beta, moving mean and variance, kernel and bias after the steps of a history.

    Also returned: the length of the way that the weights went.
    """
    gamma, beta, kernel, bias = (
        np.ones(FEATURES),
        np.zeros(FEATURES),
        np.array([0.5, -0.25, 1]),
        0.0,
    )
    moving_mean, moving_variance, way = np.zeros(FEATURES), np.ones(FEATURES), 0.0
    for step, members in enumerate(history):
        parts = [batch_of(number, step) for number in members]
        x, y = (np.concatenate(each).astype(np.float64) for each in zip(*parts, strict=True))
        mean, variance = x.mean(0), x.var(0)
        moving_mean = MOMENTUM * moving_mean + (1 - MOMENTUM) * mean
        moving_variance = MOMENTUM * moving_variance + (1 - MOMENTUM) * variance
        normal = (x - mean) / np.sqrt(variance + EPSILON)
        outputs = (gamma * normal + beta) @ kernel + bias
        slope = 2 * (outputs - y) / len(y)
        gradients = [
            (slope[:, None] * kernel * normal).sum(0), slope.sum() * kernel,
            (gamma * normal + beta).T @ slope, slope.sum(),
        ]  # fmt: skip
        gamma, beta, kernel, bias = (
            each - RATE * gradient
            for each, gradient in zip((gamma, beta, kernel, bias), gradients, strict=True)
        )
        way += RATE * float(np.linalg.norm(np.hstack(gradients)))
    return [gamma, beta, moving_mean, moving_variance, kernel[:, None], np.array([bias])], way
