"""The best cuts under a cost model, and cuts near given ones.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.segmentation.cost import CostModel

MOST_CUT_POINTS = 2000  # of more gradients, only so many are looked at, evenly spread
WORTH_A_SEGMENT = 0.01  # of the tail: what one more segment has to save


class Proposal(NamedTuple):
    """A segmentation, and the tail that the model predicts for it."""

    ends: tuple[int, ...]
    tail: float  # seconds


def best_cuts(model: CostModel, most_segments: int) -> list[Proposal]:
    """For 1, 2, ... `most_segments` segments, as far as there are gradients, the shortest tail.

    An exact dynamic programme, since to end earlier never makes what follows end later. Its time
    is that of ``segments * gradients ** 2`` additions, up to `MOST_CUT_POINTS` gradients; of more,
    no others than evenly spread ones can end a segment. Memory grows with segments * gradients.
    """
    gradients = len(model.ready)
    points = _cut_points(gradients)
    ready, sent = model.ready[points], model.sums[points] * model.seconds_per_byte
    done = np.maximum(ready, 0.0) + model.latency + sent  # end of the last of k, by its last point
    came_from: list[NDArray[np.intp]] = []
    proposals = [_proposal(model, points, came_from, done)]
    for _ in range(1, min(most_segments, len(points))):
        done, before = _one_more(done, ready, sent, model.latency)
        came_from.append(before)
        proposals.append(_proposal(model, points, came_from, done))
    return proposals


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
    3. There is room in backward for one more reduction: the longest segment is cut in two.
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
    if model.backward_end - busy > model.latency:
        firsts = [-1, *ends[:-1]]
        longest = max(range(len(ends)), key=lambda k: runs[k][1] - runs[k][0])
        cut = _middle(model, firsts[longest], ends[longest])
        found.append((*ends[:longest], cut, *ends[longest:]) if cut is not None else None)
    return [each for each in found if each is not None]


def _cut_points(gradients: int) -> NDArray[np.intp]:
    if gradients <= MOST_CUT_POINTS:
        return np.arange(gradients)
    return np.unique(np.linspace(0, gradients - 1, MOST_CUT_POINTS).round().astype(np.intp))


def _one_more(
    done: NDArray[np.float64], ready: NDArray[np.float64], sent: NDArray[np.float64], latency: float
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """`done` with one segment more, and the point at which the segment before ends."""
    more = np.full_like(done, np.inf)
    before = np.zeros(len(done), dtype=np.intp)
    for last in range(1, len(done)):
        ended = np.maximum(done[:last], ready[last]) - sent[:last]
        before[last] = ended.argmin()
        more[last] = ended[before[last]] + sent[last] + latency
    return more, before


def _proposal(
    model: CostModel,
    points: NDArray[np.intp],
    came_from: Sequence[NDArray[np.intp]],
    done: NDArray[np.float64],
) -> Proposal:
    at = [len(points) - 1]
    for before in reversed(came_from):
        at.append(int(before[at[-1]]))
    ends = tuple(int(points[each]) for each in reversed(at))
    return Proposal(ends, float(done[-1]) - model.backward_end)


def _middle(model: CostModel, before: int, last: int) -> int | None:
    """The gradient after which a segment has about half of its bytes; None where it has only one.

    The segment begins after gradient `before`.
    """
    if last - before < 2:
        return None
    start = model.sums[before] if before >= 0 else 0.0
    cut = int(np.searchsorted(model.sums, (start + model.sums[last]) / 2))
    return min(max(cut, before + 1), last - 1)
