"""The three rules of thumb for a better split of gradients.

1. The first reduction starts early, and the last is long: move the last cut later.
   For example 50, 50 % of the bytes become 80, 20.
2. The first reduction starts late, and ends after backward: move the cuts earlier.
   For example 90, 10 become 80, 20.
3. Backward is long and has room: add a segment.
   For example 80, 20 become 60, 20, 20.

The tuner applies the rules to predicted reductions, and ``hvdlite-trace`` to measured ones. This
module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hvdlite.common.segmentation.strategies import MOST_SEGMENTS

LONG_PERCENT = 10.0  # of the bytes: a last segment with more is long
SMALLER_LAST = 0.4  # rule 1 leaves this share of the last segment: 50, 50 becomes 80, 20
LEAST_MOVE_PERCENT = 5.0  # rule 2 moves at least so much of the bytes to the last segment
LATER_PART = 0.25  # rule 3 makes this share of the largest segment a segment of its own
FIRST_CUT = (80.0, 20.0)  # rule 3, where all gradients are reduced together


class TimedReduction(NamedTuple):
    """One reduction of a segment; `start` and `end` are seconds of the iteration's clock."""

    start: float
    end: float
    bytes: int


class Change(NamedTuple):
    """A proposed split of the gradients."""

    rule: int  # 1, 2 or 3
    percentages: tuple[float, ...]  # of the bytes, segment by segment; they sum to 100


def proposed_changes(
    reductions: Sequence[TimedReduction], backward_start: float, backward_end: float
) -> list[Change]:
    """Return the changes that the rules propose, the most promising first.

    `reductions`, at least one, are those of one iteration in their order. All times are seconds of
    the same clock. The list is empty where no rule applies.
    """
    if len(reductions) == 1:
        return [Change(3, FIRST_CUT)]
    shares = byte_shares(reductions)
    first, last = reductions[0], reductions[-1]
    changes: list[Change] = []
    if first.start > (backward_start + backward_end) / 2 and first.end > backward_end:
        moved = min(max(shares[-1], LEAST_MOVE_PERCENT), shares[0] / 2)
        cuts_earlier = [shares[0] - moved, *shares[1:-1], shares[-1] + moved]
        changes.append(Change(2, _rounded(cuts_earlier)))
    if first.end <= backward_end and shares[-1] > LONG_PERCENT:
        smaller = shares[-1] * SMALLER_LAST
        last_cut_later = [*shares[:-2], shares[-2] + shares[-1] - smaller, smaller]
        changes.append(Change(1, _rounded(last_cut_later)))
    # One more segment helps only where backward has room for the communication behind it.
    room = idle_seconds(reductions, backward_start, backward_end)
    if room > last.end - backward_end and len(shares) < MOST_SEGMENTS:
        k = max(range(len(shares)), key=lambda k: shares[k])
        parts = (1 - LATER_PART) * shares[k], LATER_PART * shares[k]
        changes.append(Change(3, _rounded([*shares[:k], *parts, *shares[k + 1 :]])))
    return changes


def idle_seconds(reductions: Sequence[TimedReduction], begin: float, end: float) -> float:
    """Return the seconds between `begin` and `end` in which no reduction runs."""
    busy = sum(
        max(min(reduction.end, end) - max(reduction.start, begin), 0.0) for reduction in reductions
    )
    return max(end - begin - busy, 0.0)


def byte_shares(reductions: Sequence[TimedReduction]) -> list[float]:
    """Return each segment's percentage of the bytes, for at most 8 segments.

    Of more segments, neighbours with the fewest bytes count as one. The last one stays apart, since
    the tail depends on it.
    """
    sizes = [reduction.bytes for reduction in reductions]
    while len(sizes) > MOST_SEGMENTS:
        k = min(range(len(sizes) - 2), key=lambda k: sizes[k] + sizes[k + 1])
        sizes[k : k + 2] = [sizes[k] + sizes[k + 1]]
    return list(_rounded([100 * size / max(sum(sizes), 1) for size in sizes]))


def _rounded(shares: Sequence[float]) -> tuple[float, ...]:
    """Return `shares` with one digit after the point; the largest absorbs the rounding error."""
    values = [round(share, 1) for share in shares]
    k = max(range(len(values)), key=lambda k: values[k])
    values[k] = round(100 - sum(values[:k]) - sum(values[k + 1 :]), 1)
    return tuple(values)
