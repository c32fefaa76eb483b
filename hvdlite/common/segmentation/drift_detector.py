"""The drift detector: it notices that a frozen segmentation no longer fits the job.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from hvdlite.common.segmentation.cost import MeasuredIteration

WINDOW_ITERATIONS = 20
CHANGED = 1.5  # a median that differs from the first window's by this factor is suspicious
CALM = 1.25  # a next window within this factor shows that it was a passing disturbance
# Shorter times count as this share of a step, so that noise in a negligible time is no change.
NEGLIGIBLE = 0.05


class _Times(NamedTuple):
    """The medians of a window, in seconds."""

    step: float
    backward: float
    communication: float
    tail: float


class DriftDetector:
    """A comparison of each window of iterations with the first one."""

    def __init__(self) -> None:
        self._window: list[MeasuredIteration] = []
        self._first: _Times | None = None
        self._suspicious = False

    def changed(self, iteration: MeasuredIteration) -> bool:
        """Record an iteration; return whether two windows in a row differ from the first."""
        self._window.append(iteration)
        if len(self._window) < WINDOW_ITERATIONS:
            return False
        now, self._window = _times(self._window), []
        if self._first is None:
            self._first = now
            return False
        factor = _factor(self._first, now)
        if self._suspicious and factor > CALM:
            return True
        self._suspicious = factor > CHANGED
        return False


def _times(window: list[MeasuredIteration]) -> _Times:
    step = median(iteration.end for iteration in window)
    least = NEGLIGIBLE * step
    return _Times(
        step,
        max(median(iteration.backward_end for iteration in window), least),
        max(median(iteration.communication for iteration in window), least),
        max(median(iteration.tail for iteration in window), least),
    )


def _factor(first: _Times, now: _Times) -> float:
    """Return the largest factor by which one of the times has changed, up or down."""
    pairs = [(max(pair), min(pair)) for pair in zip(first, now, strict=True)]
    return max((high / low if low > 0 else 1.0) for high, low in pairs)
