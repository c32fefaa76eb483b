"""The summary of an iteration trace: medians over iterations and ranks, and the slowest ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from glob import escape, glob
from pathlib import Path
from statistics import median
from typing import NamedTuple

from hvdlite.common.iterations.rows import PUSHES, IterationRow, RowsFormatError, read_rows
from hvdlite.common.segmentation.rules import TimedReduction

_OF_RANK = re.compile(r"(.+)\.rank(\d+)(\.\w+)")
# With a planned split, at least this share of the rows has exactly the same segments. Without one,
# gradients are fused as they become ready, and hardly two rows are equal.
PLANNED_SHARE = 0.1
Measure = Callable[[IterationRow], float | None]


class Figure(NamedTuple):
    """One measure, in seconds; only overlap is a share."""

    median: float | None  # over all rows; None: in no row
    slowest_rank: int | None  # the rank with the greatest median; None: there is only one rank
    more: float | None  # by how much the slowest rank's median exceeds that of the fastest
    medians: dict[int, float]  # by rank


class SegmentFigures(NamedTuple):
    """The medians of one segment."""

    start: float  # seconds after the beginning of forward
    duration: Figure
    bytes: int
    bandwidth: float  # bytes per second


class Summary(NamedTuple):
    """The summary of a trace; its segments are those of the rows that are `alike`."""

    ranks: int
    iterations: int  # of the lowest rank
    alike: float  # the share of rows that have these segments
    figures: dict[str, Figure]
    segments: tuple[SegmentFigures, ...]


MEASURES: dict[str, Measure] = {
    "iteration": lambda row: row.iteration_end - row.fp_start,
    "data": lambda row: row.data_time,
    "computation": lambda row: row.fp_bp_time,
    "forward": lambda row: None if row.fp_end is None else row.fp_end - row.fp_start,
    "tail": lambda row: row.tail,
    "optimizer": lambda row: row.optimizer_time,
    "overlap": lambda row: row.overlap,
}


class TraceRows(NamedTuple):
    """The rows in the files of one trace."""

    rows: list[IterationRow]  # at least one
    of_other_runs: list[str]  # the files that were left out


def read_trace(path: str) -> TraceRows:
    """Return the rows of all ranks' files of the trace `path`; any rank's file stands for all.

    A file without a rank in its name is read alone.

    A run does not delete the files of an earlier run with more ranks. All ranks of a run train at
    the same time, on one clock: a file whose iterations all lie before or after those of the first
    rank belongs to another run, and is left out.

    Raises `FileNotFoundError`, `OSError`, `RowsFormatError` for a file without rows or of another
    kind, and `ImportError` for Parquet without pyarrow.
    """
    by_file = [(file, rows) for file in _files(path) if (rows := read_rows(file))]
    if not by_file:
        raise RowsFormatError(f"{path}: there are no iterations in it")
    begin, end = _span(by_file[0][1])
    trace = TraceRows([], [])
    for file, rows in by_file:
        first, last = _span(rows)
        if last < begin or end < first:
            trace.of_other_runs.append(file)
        else:
            trace.rows.extend(rows)
    return trace


def _span(rows: Sequence[IterationRow]) -> tuple[float, float]:
    """Return the beginning of the first iteration and the end of the last."""
    return min(row.fp_start for row in rows), max(row.iteration_end for row in rows)


def _files(path: str) -> list[str]:
    """Return the files by rank; the first one is of the latest run, since every run writes it."""
    pure = Path(path)
    of_rank = _OF_RANK.fullmatch(pure.name)
    if of_rank:
        pure = pure.with_name(of_rank[1] + of_rank[3])
    elif pure.is_file():
        return [path]
    folder = Path(escape(str(pure.parent)))
    near = glob(str(folder / f"{escape(pure.stem)}.rank*{escape(pure.suffix)}"))
    matches = ((_OF_RANK.fullmatch(Path(file).name), file) for file in near)
    by_rank = sorted(
        (int(match[2]), file) for match, file in matches if match and match[1] == pure.stem
    )
    if not by_rank:
        first = pure.with_name(f"{pure.stem}.rank0{pure.suffix}")
        patterns = (f"{escape(pure.stem)}.{role}[0-9]*.csv" for role in ("server", "worker"))
        others = sorted(file for pattern in patterns for file in glob(str(folder / pattern)))
        but = f", but {others[0]}: it holds {PUSHES}" if others else ""
        raise FileNotFoundError(f"{path}: there is no such file, and no {first}{but}")
    return [file for _, file in by_rank]


def alike(rows: Sequence[IterationRow]) -> list[IterationRow]:
    """Return the rows with the most common segments, or with the most common number of segments."""
    kinds: tuple[tuple[Callable[[IterationRow], object], float], ...] = (
        (lambda row: tuple(segment.bytes for segment in row.segments), PLANNED_SHARE),
        (lambda row: len(row.segments), 0.0),
    )
    for kind, least in kinds:
        most_common, times = Counter(map(kind, rows)).most_common(1)[0]
        if times >= least * len(rows):
            break
    return [row for row in rows if kind(row) == most_common]


def summarize(rows: Sequence[IterationRow]) -> Summary:
    same = alike(rows)
    ranks = {row.rank for row in rows}
    return Summary(
        len(ranks),
        sum(row.rank == min(ranks) for row in rows),
        len(same) / len(rows),
        {name: _figure(rows, measure) for name, measure in MEASURES.items()},
        tuple(_segment(same, k) for k in range(len(same[0].segments))),
    )


def _figure(rows: Iterable[IterationRow], measure: Measure) -> Figure:
    by_rank: dict[int, list[float]] = {}
    for row in rows:
        value = measure(row)
        if value is not None:
            by_rank.setdefault(row.rank, []).append(value)
    if not by_rank:
        return Figure(None, None, None, {})
    middle = median(value for values in by_rank.values() for value in values)
    medians = {rank: median(values) for rank, values in by_rank.items()}
    if len(by_rank) == 1:
        return Figure(middle, None, None, medians)
    slowest = max(medians, key=lambda rank: (medians[rank], -rank))
    return Figure(middle, slowest, medians[slowest] - min(medians.values()), medians)


def _segment(rows: Sequence[IterationRow], k: int) -> SegmentFigures:
    duration = _figure(rows, lambda row: row.segments[k].end - row.segments[k].start)
    nbytes = int(median(row.segments[k].bytes for row in rows))
    start = median(row.segments[k].start - row.fp_start for row in rows)
    return SegmentFigures(start, duration, nbytes, nbytes / max(duration.median or 0.0, 1e-9))


def iterations_of(rows: Sequence[IterationRow]) -> list[list[IterationRow]]:
    """Return the rows of each iteration that all ranks have, with the most common segments."""
    by_iteration: dict[int, list[IterationRow]] = {}
    for row in alike(rows):
        by_iteration.setdefault(row.iteration, []).append(row)
    ranks = max(map(len, by_iteration.values()))
    return [of_ranks for of_ranks in by_iteration.values() if len(of_ranks) == ranks]


def median_iteration(rows: Sequence[IterationRow]) -> list[IterationRow]:
    """Return all ranks' rows of an iteration of median length, by rank."""
    iterations = iterations_of(rows)
    iterations.sort(key=lambda of_ranks: max(row.iteration_end - row.fp_start for row in of_ranks))
    return sorted(iterations[len(iterations) // 2], key=lambda row: row.rank)


# The typical iteration of a trace, on the rank that ends backward last and delays the others.


class TypicalIteration(NamedTuple):
    """The medians of a trace, in seconds after the beginning of forward."""

    fp_end: float | None  # None: not seen
    bp_end: float
    iteration_end: float
    reductions: tuple[TimedReduction, ...]
    wait: float  # from the first rank's end of backward to the last rank's
    last_ranks: Counter[int]  # in how many iterations each rank was the last at that end


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
    times_last = Counter(row.rank for row in last)
    return TypicalIteration(
        fp_end, bp_end, iteration_end, tuple(reductions), median(waits), times_last
    )


def _bp_end(row: IterationRow) -> float:
    assert row.bp_end is not None  # callers pass only rows that have it
    return row.bp_end
