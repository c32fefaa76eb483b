"""The typical iteration of a trace, on the rank that ends backward last and delays the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from hvdlite.common.iterations.rows import IterationRow
from hvdlite.common.segmentation.rules import TimedReduction
from hvdlite.tools.trace_summary import iterations_of


class TypicalIteration(NamedTuple):
    """The medians of a trace, in seconds after the beginning of forward."""

    fp_end: float | None  # None: not seen
    bp_end: float
    iteration_end: float
    reductions: tuple[TimedReduction, ...]
    wait: float  # from the first rank's end of backward to the last rank's


def typical_iteration(rows: Sequence[IterationRow]) -> TypicalIteration | None:
    """Return the typical iteration of at least one row; None where no row has `bp_end`.

    All times but `bp_end` are medians relative to the end of backward in the same row. So their
    order before and after the end of backward is right even where iterations differ in length.
    """
    last: list[IterationRow] = []
    waits: list[float] = []
    for iteration in iterations_of(rows):
        ended = sorted((row for row in iteration if row.bp_end is not None), key=_bp_end)
        if ended:
            last.append(ended[-1])
            waits.append(_bp_end(ended[-1]) - _bp_end(ended[0]))
    if not last:
        return None
    bp_end = median(_bp_end(row) - row.fp_start for row in last)

    def median_time(times: Iterable[float | None]) -> float | None:
        after = [
            time - _bp_end(row) for time, row in zip(times, last, strict=True) if time is not None
        ]
        return bp_end + median(after) if after else None

    def known_median(times: Iterable[float]) -> float:
        seconds = median_time(times)
        assert seconds is not None
        return seconds

    reductions = []
    for segments in zip(*(row.segments for row in last), strict=True):
        starts, ends, sizes = zip(*segments, strict=True)
        reductions.append(
            TimedReduction(known_median(starts), known_median(ends), int(median(sizes)))
        )
    iteration_end = known_median(row.iteration_end for row in last)
    fp_end = median_time(row.fp_end for row in last)
    return TypicalIteration(fp_end, bp_end, iteration_end, tuple(reductions), median(waits))


def _bp_end(row: IterationRow) -> float:
    assert row.bp_end is not None  # callers pass only rows that have it
    return row.bp_end
