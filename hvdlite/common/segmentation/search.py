"""The search for the segmentation with the shortest tail that a cost model predicts.

`best_cuts` is exact for one model, `robust_cuts` covers iterations that vary, and `neighbours`
applies the rules of thumb. This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.segmentation.cost import CostModel, Forecast
from hvdlite.common.segmentation.rules import TimedReduction, proposed_changes
from hvdlite.common.segmentation.strategies import nearest_indices

MOST_CUT_POINTS = 2000  # candidates for the end of a segment, evenly spread among the gradients
LATENESS = (0.5, 0.75, 0.9)  # the quantiles of ready times for which `robust_cuts` searches
WORTH_A_SEGMENT = 0.01  # the share of the tail that one more segment has to save


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
    points = _cut_points(len(model.ready))
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


def _cut_points(gradients: int) -> NDArray[np.intp]:
    if gradients <= MOST_CUT_POINTS:
        return np.arange(gradients)
    return np.unique(np.linspace(0, gradients - 1, MOST_CUT_POINTS).round().astype(np.intp))


def _proposal(
    model: CostModel, points: NDArray[np.intp], previous: NDArray[np.intp], end: float
) -> Proposal:
    """Follow the table `previous` back from the last point, which ends the last segment."""
    path = [len(points) - 1]
    for row in reversed(previous):
        path.append(int(row[path[-1]]))
    last_indices = tuple(int(points[point]) for point in reversed(path))
    return Proposal(last_indices, float(end) - model.backward_end)
