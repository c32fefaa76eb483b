"""Tries segmentations in turns, and ranks them by what was measured.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from hvdlite.common.segmentation.cost import Iteration

TURN_ITERATIONS = 3  # that count, of one segmentation before it is the turn of the next one
PASSES = 3  # turns of each
MOST_PASSES = 6  # of those that noise does not let tell apart
LOST = 1.5  # who has such a multiple of the best tail gets no further turn, if that is no noise
EQUAL = 0.01  # tails that differ by less than this share are equal
DEVIATION = 1.4826  # standard deviations of a normal distribution in its median deviation
MEDIAN_ERROR = 1.2533  # of the standard error of the mean: that of the median


class Trials:
    """Short turns, one after another and several times, so that a drifting machine is fair."""

    def __init__(self, candidates: Sequence[tuple[int, ...]]) -> None:
        """Try these, at least one, which are distinct."""
        self._tails: dict[tuple[int, ...], list[float]] = {each: [] for each in candidates}
        self._left = list(candidates)  # for turns in this pass
        self._pass = 1
        self._in_turn = 0

    @property
    def current(self) -> tuple[int, ...]:
        """The ends that the next iteration shall have."""
        return self._left[0]

    @property
    def finished(self) -> bool:
        """Whether all turns are over."""
        return not self._left

    def observe(self, iteration: Iteration) -> None:
        """Take in an iteration of `current`; the first of each turn does not count."""
        if self._in_turn:
            self._tails[self.current].append(iteration.tail)
        self._in_turn += 1
        if self._in_turn > TURN_ITERATIONS:
            self._in_turn = 0
            del self._left[0]
            if not self._left:
                self._pass += 1
                self._left = self._still_open()

    def ranking(self, predicted: Callable[[tuple[int, ...]], float]) -> list[tuple[int, ...]]:
        """The best first: where noise does not let tell which one that is, as is `predicted`.

        After it the others, by their tails.
        """
        by_tail = sorted(self._tails, key=self._tail)
        chosen = min(self._equal(by_tail[0]), key=predicted)
        return [chosen, *(ends for ends in by_tail if ends != chosen)]

    def _still_open(self) -> list[tuple[int, ...]]:
        """Whose turn it is in the next pass."""
        best = min(self._tails, key=self._tail)
        equal = self._equal(best)
        if self._pass <= PASSES:
            hopeful = {ends for ends in self._tails if self._tail(ends) <= LOST * self._tail(best)}
            return [ends for ends in self._tails if ends in hopeful.union(equal)]
        unsure = any(self._tail(ends) > (1 + EQUAL) * self._tail(best) for ends in equal)
        return equal if unsure and self._pass <= MOST_PASSES else []

    def _tail(self, ends: tuple[int, ...]) -> float:
        return median(self._tails[ends])

    def _equal(self, best: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Those that equal the best as far as noise lets tell, itself included."""
        least, error = self._tail(best), _error(self._tails[best])
        return [
            ends
            for ends, tails in self._tails.items()
            if self._tail(ends) - least <= max(math.hypot(error, _error(tails)), EQUAL * least)
        ]


def _error(values: Sequence[float]) -> float:
    """The standard error of the median, by a measure that outliers do not change."""
    middle = median(values)
    deviation = DEVIATION * median(abs(each - middle) for each in values)
    return float(MEDIAN_ERROR * deviation / len(values) ** 0.5)
