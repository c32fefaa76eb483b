"""The best cuts under a cost model, and cuts near given ones.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.segmentation.cost import CostModel, Forecast
from hvdlite.common.segmentation.strategies import MOST_SEGMENTS

MOST_CUT_POINTS = 2000  # of more gradients, only so many are looked at, evenly spread
LATENESS = (0.5, 0.75, 0.9)  # of gradients, that the search for robust cuts assumes
WORTH_A_SEGMENT = 0.01  # of the tail: what one more segment has to save


class Proposal(NamedTuple):
    """A segmentation, and the tail that the model predicts for it."""

    ends: tuple[int, ...]
    tail: float  # seconds


def best_cuts(model: CostModel, most_segments: int) -> list[Proposal]:
    """For 1, 2, ... `most_segments` segments, as far as there are gradients, the shortest tail.

    An exact dynamic programme, since to end earlier never makes what follows end later. Its time
    is that of ``segments * gradients ** 2 / 2`` additions: below a tenth of a second for 8 segments
    and `MOST_CUT_POINTS` gradients. Of more gradients,
    no others than evenly spread ones can end a segment. Memory grows with segments * gradients.
    """
    gradients = len(model.ready)
    points = _cut_points(gradients)
    ready, sums = model.ready[points], model.sums[points]
    most = min(most_segments, len(points))
    done = np.full((most, len(points)), np.inf)  # [k, j]: end of the last of k + 1, which ends at j
    before = np.zeros((most, len(points)), dtype=np.intp)  # where the segment before that ends
    done[0] = np.maximum(ready, 0.0) + model.cost.seconds(sums)
    for last in range(1, len(points)):
        took = model.cost.seconds(sums[last] - sums[:last])
        ended = np.maximum(done[:-1, :last], ready[last]) + took
        before[1:, last] = ended.argmin(axis=1)
        done[1:, last] = ended.min(axis=1)
    return [
        _proposal(model, points, before[1:segments], done[segments - 1, -1])
        for segments in range(1, most + 1)
    ]


def robust_cuts(forecast: Forecast, most_segments: int) -> list[Proposal]:
    """As `best_cuts`, with the shortest tail on average: those that are best for some lateness."""
    by_segments: dict[int, set[tuple[int, ...]]] = {}
    for lateness in LATENESS:
        for proposal in best_cuts(forecast.model(lateness), most_segments):
            by_segments.setdefault(len(proposal.ends), set()).add(proposal.ends)
    return [
        min((Proposal(ends, forecast.tail(ends)) for ends in found), key=lambda each: each.tail)
        for _, found in sorted(by_segments.items())
    ]


def worthwhile(proposals: Iterable[Proposal]) -> list[Proposal]:
    """Those that are better than each with fewer segments by a share that may be seen.

    `proposals` ascend by their segments; the last of the result has the shortest tail.
    """
    kept: list[Proposal] = []
    for proposal in proposals:
        if not kept or proposal.tail < (1 - WORTH_A_SEGMENT) * kept[-1].tail:
            kept.append(proposal)
    return kept


def neighbours(model: CostModel, ends: Sequence[int]) -> list[tuple[int, ...]]:
    """What the three rules of thumb make of a segmentation; those that do not apply give nothing.

    1. Everything but the last reduction hides behind backward: the last cut moves later.
    2. The first reduction ends after backward: the first cut moves earlier.
    3. There is room in backward for one more reduction: the longest segment is cut in two, unless
       there are as many as there may be.
    """
    runs = model.runs(ends)
    found: list[tuple[int, ...] | None] = []
    if len(ends) > 1 and runs[-2][1] <= model.backward_end < runs[-1][1]:
        cut = _middle(model, ends[-2], ends[-1])
        found.append((*ends[:-2], cut, ends[-1]) if cut is not None else None)
    if len(ends) > 1 and runs[0][1] > model.backward_end:
        cut = _middle(model, -1, ends[0])
        found.append((cut, *ends[1:]) if cut is not None else None)
    busy = sum(max(min(end, model.backward_end) - start, 0.0) for start, end in runs)
    if len(ends) < MOST_SEGMENTS and model.backward_end - busy > model.cost.latency:
        firsts = [-1, *ends[:-1]]
        longest = max(range(len(ends)), key=lambda k: runs[k][1] - runs[k][0])
        cut = _middle(model, firsts[longest], ends[longest])
        found.append((*ends[:longest], cut, *ends[longest:]) if cut is not None else None)
    return [each for each in found if each is not None]


def _cut_points(gradients: int) -> NDArray[np.intp]:
    if gradients <= MOST_CUT_POINTS:
        return np.arange(gradients)
    return np.unique(np.linspace(0, gradients - 1, MOST_CUT_POINTS).round().astype(np.intp))


def _proposal(
    model: CostModel,
    points: NDArray[np.intp],
    before: NDArray[np.intp],
    end: float,
) -> Proposal:
    at = [len(points) - 1]
    for each in reversed(before):
        at.append(int(each[at[-1]]))
    ends = tuple(int(points[each]) for each in reversed(at))
    return Proposal(ends, float(end) - model.backward_end)


def _middle(model: CostModel, before: int, last: int) -> int | None:
    """The gradient after which a segment has about half of its bytes; None where it has only one.

    The segment begins after gradient `before`.
    """
    if last - before < 2:
        return None
    start = model.sums[before] if before >= 0 else 0.0
    cut = int(np.searchsorted(model.sums, (start + model.sums[last]) / 2))
    return min(max(cut, before + 1), last - 1)
