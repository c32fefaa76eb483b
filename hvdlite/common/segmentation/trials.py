"""Trials: measure several segmentations in alternating turns, and rank them by their tails.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from hvdlite.common.segmentation.cost import MeasuredIteration

TURN_ITERATIONS = 3  # measured iterations of a candidate in one turn
PASSES = 3  # turns of each candidate
MOST_PASSES = 6  # turns of candidates that the noise does not let tell apart
LOST = 1.5  # a candidate with this multiple of the best tail drops out, unless that may be noise
EQUAL = 0.01  # tails that differ by less than this share are equal
# Two constants of the normal distribution: its standard deviation is 1.4826 median absolute
# deviations (Hampel 1974), and its median has 1.2533, sqrt(pi / 2), standard errors of its mean.
DEVIATION = 1.4826
MEDIAN_ERROR = 1.2533


class Trials:
    """The trials of one round.

    Candidates alternate in short turns, so that a machine that drifts slows all of them alike.
    """

    def __init__(self, candidates: Sequence[tuple[int, ...]]) -> None:
        """Try `candidates`, at least one, all distinct."""
        self._tails: dict[tuple[int, ...], list[float]] = {
            candidate: [] for candidate in candidates
        }
        self._left = list(candidates)  # candidates whose turn in this pass is not over
        self._pass = 1
        self._in_turn = 0

    @property
    def current(self) -> tuple[int, ...]:
        """The last indices of the segments that the next iteration should use."""
        return self._left[0]

    @property
    def finished(self) -> bool:
        return not self._left

    def observe(self, iteration: MeasuredIteration) -> None:
        """Record an iteration of `current`; the first of each turn does not count."""
        if self._in_turn:  # the first one still pays for the change of segments
            self._tails[self.current].append(iteration.tail)
        self._in_turn += 1
        if self._in_turn > TURN_ITERATIONS:
            self._in_turn = 0
            del self._left[0]
            if not self._left:
                self._pass += 1
                self._left = self._next_pass()

    def ranking(self, predicted: Callable[[tuple[int, ...]], float]) -> list[tuple[int, ...]]:
        """Return the candidates, the best first, the others by their tails.

        Where the noise leaves several equally good, the best is the one with the shortest tail as
        `predicted` by the model.
        """
        by_tail = sorted(self._tails, key=self._tail)
        chosen = min(self._equal_to(by_tail[0]), key=predicted)
        return [chosen, *(candidate for candidate in by_tail if candidate != chosen)]

    def _next_pass(self) -> list[tuple[int, ...]]:
        """Return the candidates that get a turn in the next pass."""
        best = min(self._tails, key=self._tail)
        equal = self._equal_to(best)
        if self._pass <= PASSES:
            limit = LOST * self._tail(best)
            return [
                candidate
                for candidate in self._tails
                if self._tail(candidate) <= limit or candidate in equal
            ]
        unsure = any(self._tail(candidate) > (1 + EQUAL) * self._tail(best) for candidate in equal)
        return equal if unsure and self._pass <= MOST_PASSES else []

    def _tail(self, candidate: tuple[int, ...]) -> float:
        return median(self._tails[candidate])

    def _equal_to(self, best: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the candidates that equal the best as far as the noise can tell, with itself."""
        least, error = self._tail(best), _error(self._tails[best])
        return [
            candidate
            for candidate, tails in self._tails.items()
            if self._tail(candidate) - least <= max(math.hypot(error, _error(tails)), EQUAL * least)
        ]


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the median, estimated so that outliers do not change it."""
    middle = median(values)
    deviation = DEVIATION * median(abs(value - middle) for value in values)
    return float(MEDIAN_ERROR * deviation / len(values) ** 0.5)
