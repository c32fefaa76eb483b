"""Bayesian optimisation over a few points of the unit cube: where to measure next.

A Gaussian process predicts the score of every point from the points measured so far (Rasmussen and
Williams, "Gaussian Processes for Machine Learning", 2006), and the point with the largest expected
improvement is measured next (Jones, Schonlau and Welch, "Efficient Global Optimization", 1998).

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Point = tuple[float, ...]

EXPLORATION = 0.01  # What an improvement must exceed, in standard deviations of the scores.
SCALES = (0.1, 0.2, 0.4, 0.8)  # Candidates for the length scale; the likeliest is used.
JITTER = 1e-6  # Keeps the covariance matrix regular without noise.


def most_promising(
    measured: Sequence[tuple[Point, float]], points: Sequence[Point], noise: float
) -> int:
    """Return the index of the one of `points` with the largest expected improvement.

    `points` and `measured` hold at least one point each. `measured` has the scores, of which larger
    is better; `noise` is the variance of the measurements, where the scores have variance 1.
    """
    seen = np.array([point for point, _ in measured])
    scores = np.array([score for _, score in measured])
    scores = (scores - scores.mean()) / (scores.std() or 1.0)
    scale = max(SCALES, key=lambda candidate: _likelihood(seen, scores, candidate, noise))
    mean, deviation = _predict(seen, scores, np.array(points), scale, noise)
    # The best prediction at a measured point, not the best score, which was lucky by some noise.
    smoothed, _ = _predict(seen, scores, seen, scale, noise)
    return int(_improvement(mean, deviation, float(smoothed.max())).argmax())


def _kernel(first: Floats, second: Floats, scale: float) -> Floats:
    squared_distance = ((first[:, None, :] - second[None, :, :]) ** 2).sum(axis=2)
    kernel: Floats = np.exp(-squared_distance / (2 * scale**2))
    return kernel


def _covariance(seen: Floats, scale: float, noise: float) -> Floats:
    return _kernel(seen, seen, scale) + (noise + JITTER) * np.eye(len(seen))


def _likelihood(seen: Floats, scores: Floats, scale: float, noise: float) -> float:
    """Return the logarithm of the marginal likelihood, but for a constant."""
    covariance = _covariance(seen, scale, noise)
    fit = scores @ np.linalg.solve(covariance, scores)
    return float(-fit - np.linalg.slogdet(covariance)[1]) / 2


def _predict(
    seen: Floats, scores: Floats, points: Floats, scale: float, noise: float
) -> tuple[Floats, Floats]:
    """Return mean and standard deviation of the score at each point."""
    cross = _kernel(points, seen, scale)
    solved = np.linalg.solve(_covariance(seen, scale, noise), np.column_stack([scores, cross.T]))
    variance = 1 - np.einsum("ij,ji->i", cross, solved[:, 1:])
    return cross @ solved[:, 0], np.sqrt(np.maximum(variance, 0))


def _improvement(mean: Floats, deviation: Floats, best: float) -> Floats:
    """Return the expected improvement over `best`, for normally distributed scores."""
    gain = mean - best - EXPLORATION
    z = gain / np.maximum(deviation, 1e-12)
    probability = np.array([math.erf(value / math.sqrt(2)) for value in z]) / 2 + 0.5
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    improvement: Floats = gain * probability + deviation * density
    return improvement
