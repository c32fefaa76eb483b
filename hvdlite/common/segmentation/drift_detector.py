"""Notices that a frozen segmentation is one for another machine, model or network than now.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from hvdlite.common.segmentation.cost import Iteration

WINDOW_ITERATIONS = 20
CHANGED = 1.5  # a factor, up or down, of the median of a window...
CALM = 1.25  # ...and of the next one: if that is nearer than this, it was a disturbance
NEGLIGIBLE = 0.05  # of a step: what takes less counts as much, so that nothing is no change


class _Times(NamedTuple):
    """Medians of a window, seconds."""

    step: float
    backward: float
    communication: float
    tail: float


class Watch:
    """Compares each window of iterations with the first one."""

    def __init__(self) -> None:
        self._window: list[Iteration] = []
        self._first: _Times | None = None
        self._suspicious = False

    def changed(self, iteration: Iteration) -> bool:
        """Take in an iteration; whether two windows in a row differ by much from the first."""
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


def _times(window: list[Iteration]) -> _Times:
    step = median(each.end for each in window)
    least = NEGLIGIBLE * step
    return _Times(
        step,
        max(median(each.backward_end for each in window), least),
        max(median(each.communication for each in window), least),
        max(median(each.tail for each in window), least),
    )


def _factor(first: _Times, now: _Times) -> float:
    """The largest factor by which one of the times has changed, up or down."""
    pairs = [(max(pair), min(pair)) for pair in zip(first, now, strict=True)]
    return max((high / low if low > 0 else 1.0) for high, low in pairs)
