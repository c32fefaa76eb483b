"""Where to measure next: Bayesian optimisation over a few points of the unit cube.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Point = tuple[float, ...]

EXPLORATION = 0.01  # what an improvement must exceed, in standard deviations of the scores
SCALES = (0.1, 0.2, 0.4, 0.8)  # over which scores may change; the likeliest is taken
JITTER = 1e-6  # keeps the matrix regular where nothing is noise


def most_promising(
    measured: Sequence[tuple[Point, float]], points: Sequence[Point], noise: float
) -> int:
    """The index of the one of `points`, at least one, where to expect the largest improvement.

    `measured` are points, at least one, with their scores, of which larger is better; `noise` is
    the variance of the measurements, where the scores have variance 1.
    """
    seen = np.array([point for point, _ in measured])
    scores = np.array([score for _, score in measured])
    scores = (scores - scores.mean()) / (scores.std() or 1.0)
    scale = max(SCALES, key=lambda each: _likelihood(seen, scores, each, noise))
    mean, deviation = _predict(seen, scores, np.array(points), scale, noise)
    known, _ = _predict(seen, scores, seen, scale, noise)  # scores, less their noise
    return int(_improvement(mean, deviation, float(known.max())).argmax())


def _kernel(first: Floats, second: Floats, scale: float) -> Floats:
    apart = ((first[:, None, :] - second[None, :, :]) ** 2).sum(axis=2)
    kernel: Floats = np.exp(-apart / (2 * scale**2))
    return kernel


def _covariance(seen: Floats, scale: float, noise: float) -> Floats:
    return _kernel(seen, seen, scale) + (noise + JITTER) * np.eye(len(seen))


def _likelihood(seen: Floats, scores: Floats, scale: float, noise: float) -> float:
    """The logarithm of the marginal likelihood, but for a constant."""
    covariance = _covariance(seen, scale, noise)
    fit = scores @ np.linalg.solve(covariance, scores)
    return float(-fit - np.linalg.slogdet(covariance)[1]) / 2


def _predict(
    seen: Floats, scores: Floats, points: Floats, scale: float, noise: float
) -> tuple[Floats, Floats]:
    """Mean and standard deviation of the score at each point."""
    cross = _kernel(points, seen, scale)
    solved = np.linalg.solve(_covariance(seen, scale, noise), np.column_stack([scores, cross.T]))
    variance = 1 - np.einsum("ij,ji->i", cross, solved[:, 1:])
    return cross @ solved[:, 0], np.sqrt(np.maximum(variance, 0))


def _improvement(mean: Floats, deviation: Floats, best: float) -> Floats:
    """The expected improvement over `best`."""
    gain = mean - best - EXPLORATION
    at = gain / np.maximum(deviation, 1e-12)
    below = np.array([math.erf(each / math.sqrt(2)) for each in at]) / 2 + 0.5
    density = np.exp(-(at**2) / 2) / math.sqrt(2 * math.pi)
    improvement: Floats = gain * below + deviation * density
    return improvement
