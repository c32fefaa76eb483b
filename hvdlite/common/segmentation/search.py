"""The search for the segmentation with the shortest tail that a cost model predicts.

`best_cuts` is exact for one model, `robust_cuts` covers iterations that vary, and `neighbours`
applies the rules of thumb. This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.segmentation.cost import CostModel, Forecast, MeasuredIteration
from hvdlite.common.segmentation.rules import TimedReduction, proposed_changes
from hvdlite.common.segmentation.strategies import nearest_indices

MOST_CUT_POINTS = 2000  # candidates for the end of a segment, evenly spread among the gradients
LATENESS = (0.5, 0.75, 0.9)  # the quantiles of ready times for which `robust_cuts` searches
WORTH_A_SEGMENT = 0.01  # the share of the tail that one more segment has to save
TURN_ITERATIONS = 3  # measured iterations of a candidate in one turn
PASSES = 3  # turns of each candidate
MOST_PASSES = 6  # turns of candidates that the noise does not let tell apart
LOST = 1.5  # a candidate with this multiple of the best tail drops out, unless that may be noise
EQUAL = 0.01  # tails that differ by less than this share are equal
# Two constants of the normal distribution: its standard deviation is 1.4826 median absolute
# deviations (Hampel 1974), and its median has 1.2533, sqrt(pi / 2), standard errors of its mean.
DEVIATION = 1.4826
MEDIAN_ERROR = 1.2533


class Proposal(NamedTuple):
    """A segmentation, and the tail that the model predicts for it."""

    last_indices: tuple[int, ...]
    tail: float  # seconds


def best_cuts(model: CostModel, most_segments: int) -> list[Proposal]:
    """Return the segmentation with the shortest tail for each count of segments from 1 on.

    The counts end at `most_segments`, or at the number of gradients where that is smaller. The
    method is dynamic programming (Bellman, 1957): it is exact, since a segment that ends earlier
    never delays those behind it. The time is that of ``segments * gradients ** 2 / 2`` additions,
    below 0.1 s for 8 segments and `MOST_CUT_POINTS` gradients; the memory grows with ``segments *
    gradients``. Of more gradients, only `MOST_CUT_POINTS` evenly spread ones can end a segment.
    """
    points = np.arange(len(model.ready))
    if len(points) > MOST_CUT_POINTS:
        spread = np.linspace(0, len(points) - 1, MOST_CUT_POINTS)
        points = np.unique(spread.round().astype(np.intp))
    ready, sums = model.ready[points], model.sums[points]
    most = min(most_segments, len(points))
    # done[k, j] is the earliest end of the reduction of segment k, which ends with point j, and
    # previous[k, j] is the point with which segment k - 1 then ends.
    done = np.full((most, len(points)), np.inf)
    previous = np.zeros((most, len(points)), dtype=np.intp)
    done[0] = np.maximum(ready, 0.0) + model.cost.seconds(sums)
    for last in range(1, len(points)):
        duration = model.cost.seconds(sums[last] - sums[:last])
        ended = np.maximum(done[:-1, :last], ready[last]) + duration
        previous[1:, last] = ended.argmin(axis=1)
        done[1:, last] = ended.min(axis=1)
    return [
        _proposal(model, points, previous[1:segments], done[segments - 1, -1])
        for segments in range(1, most + 1)
    ]


def robust_cuts(forecast: Forecast, most_segments: int) -> list[Proposal]:
    """Return the proposals with the shortest mean tail for each count of segments.

    The candidates are the results of `best_cuts` for each of the quantiles `LATENESS`.
    """
    by_count: dict[int, set[tuple[int, ...]]] = {}
    for lateness in LATENESS:
        for proposal in best_cuts(forecast.model(lateness), most_segments):
            by_count.setdefault(len(proposal.last_indices), set()).add(proposal.last_indices)
    return [
        min(
            (Proposal(last_indices, forecast.tail(last_indices)) for last_indices in candidates),
            key=lambda proposal: proposal.tail,
        )
        for _, candidates in sorted(by_count.items())
    ]


def worthwhile(proposals: Iterable[Proposal]) -> list[Proposal]:
    """Return the proposals whose tail is visibly shorter than with fewer segments.

    `proposals` ascend by their number of segments; the last result has the shortest tail.
    """
    kept: list[Proposal] = []
    for proposal in proposals:
        if not kept or proposal.tail < (1 - WORTH_A_SEGMENT) * kept[-1].tail:
            kept.append(proposal)
    return kept


def neighbours(model: CostModel, last_indices: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the segmentations that the three rules of thumb derive from this one.

    The list is empty where no rule applies. Time 0 of the model is the beginning of backward.
    """
    reductions = [
        TimedReduction(start, end, int(nbytes))
        for (start, end), nbytes in zip(
            model.reductions(last_indices), model.segment_bytes(last_indices), strict=True
        )
    ]
    sums: list[float] = model.sums.tolist()
    derived = [
        tuple(nearest_indices(sums, change.percentages))
        for change in proposed_changes(reductions, 0.0, model.backward_end)
    ]
    return [candidate for candidate in derived if candidate != tuple(last_indices)]


def _proposal(
    model: CostModel, points: NDArray[np.intp], previous: NDArray[np.intp], end: float
) -> Proposal:
    """Follow the table `previous` back from the last point, which ends the last segment."""
    path = [len(points) - 1]
    for row in reversed(previous):
        path.append(int(row[path[-1]]))
    last_indices = tuple(int(points[point]) for point in reversed(path))
    return Proposal(last_indices, float(end) - model.backward_end)


# Trials: measure several segmentations in alternating turns, and rank them by their tails.
#
# This module never sends, sleeps or reads a clock.


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
