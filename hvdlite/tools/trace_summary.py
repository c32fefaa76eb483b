"""What an iteration trace says: medians over iterations and ranks, and who is slowest."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from glob import escape, glob
from pathlib import Path
from statistics import median
from typing import NamedTuple

from hvdlite.common.iterations.files import RowsFormatError, read_rows
from hvdlite.common.iterations.rows import IterationRow

_OF_RANK = re.compile(r"(.+)\.rank(\d+)(\.\w+)")
MOSTLY = 0.1  # of the rows have a cut that is one, and not what came as it comes
Measure = Callable[[IterationRow], float | None]


class Figure(NamedTuple):
    """One measure: its median over all rows; seconds, but for overlap."""

    median: float | None  # None: seen in no row
    slowest_rank: int | None  # the one with the greatest median; None: there is only one
    more: float | None  # by which its median exceeds that of all rows


class SegmentFigures(NamedTuple):
    """One segment, in the order in which they run."""

    start: float  # seconds after the beginning of forward
    duration: Figure
    bytes: int
    bandwidth: float  # bytes in a second


class Summary(NamedTuple):
    """All of a trace. Segments are those of the rows that are `alike`."""

    ranks: int
    iterations: int  # that rank 0, or the lowest rank, has made
    alike: float  # share of the rows
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


class Trace(NamedTuple):
    """What the files of a trace hold."""

    rows: list[IterationRow]  # at least one
    of_other_runs: list[str]  # files that were left out


def read_trace(path: str) -> Trace:
    """The rows of all ranks' files of the trace `path`; that of one rank stands for all of them.

    A file without a rank in its name is read alone.

    A run leaves the files of an earlier one with more ranks. All ranks of a run train at the same
    time, on one clock: a file whose iterations all lie before or after those of the first rank is
    of another run, and left out.

    Raises `FileNotFoundError`, `OSError`, `RowsFormatError` for a file without rows or of another
    kind, and `ImportError` for Parquet without pyarrow.
    """
    read = [(each, rows) for each in _files(path) if (rows := read_rows(each))]
    if not read:
        raise RowsFormatError(f"{path}: there are no iterations in it")
    begin, end = _span(read[0][1])
    trace = Trace([], [])
    for each, rows in read:
        first, last = _span(rows)
        if last < begin or end < first:
            trace.of_other_runs.append(each)
        else:
            trace.rows.extend(rows)
    return trace


def _span(rows: Sequence[IterationRow]) -> tuple[float, float]:
    """From the beginning of the first iteration to the end of the last."""
    return min(row.fp_start for row in rows), max(row.iteration_end for row in rows)


def _files(path: str) -> list[str]:
    """By rank: that of the lowest is written by every run."""
    pure = Path(path)
    of_rank = _OF_RANK.fullmatch(pure.name)
    if of_rank:
        pure = pure.with_name(of_rank[1] + of_rank[3])
    elif pure.is_file():
        return [path]
    near = glob(str(pure.with_name(f"{escape(pure.stem)}.rank*{escape(pure.suffix)}")))
    matches = ((_OF_RANK.fullmatch(Path(each).name), each) for each in near)
    found = sorted(
        (int(match[2]), each) for match, each in matches if match and match[1] == pure.stem
    )
    if not found:
        first = pure.with_name(f"{pure.stem}.rank0{pure.suffix}")
        raise FileNotFoundError(f"{path}: there is no such file, and no {first}")
    return [each for _, each in found]


def alike(rows: Sequence[IterationRow]) -> list[IterationRow]:
    """The rows that have the most common segments, or else the most common number of them."""
    for kind, least in ((_sizes, MOSTLY), (_number, 0.0)):
        found, times = Counter(map(kind, rows)).most_common(1)[0]
        if times >= least * len(rows):
            break
    return [row for row in rows if kind(row) == found]


def _sizes(row: IterationRow) -> object:
    return tuple(segment.bytes for segment in row.segments)


def _number(row: IterationRow) -> object:
    return len(row.segments)


def summarize(rows: Sequence[IterationRow]) -> Summary:
    """The medians of at least one row."""
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
        return Figure(None, None, None)
    middle = median(value for values in by_rank.values() for value in values)
    if len(by_rank) == 1:
        return Figure(middle, None, None)
    medians = {rank: median(values) for rank, values in by_rank.items()}
    slowest = max(medians, key=lambda rank: (medians[rank], -rank))
    return Figure(middle, slowest, medians[slowest] - middle)


def _segment(rows: Sequence[IterationRow], k: int) -> SegmentFigures:
    duration = _figure(rows, lambda row: row.segments[k].end - row.segments[k].start)
    nbytes = int(median(row.segments[k].bytes for row in rows))
    start = median(row.segments[k].start - row.fp_start for row in rows)
    return SegmentFigures(start, duration, nbytes, nbytes / max(duration.median or 0.0, 1e-9))


def iterations_of(rows: Sequence[IterationRow]) -> list[list[IterationRow]]:
    """Iterations that all ranks have, each with the most common number of segments."""
    by_iteration: dict[int, list[IterationRow]] = {}
    for row in alike(rows):
        by_iteration.setdefault(row.iteration, []).append(row)
    ranks = max(map(len, by_iteration.values()))
    return [each for each in by_iteration.values() if len(each) == ranks]


def median_iteration(rows: Sequence[IterationRow]) -> list[IterationRow]:
    """All ranks' rows of one iteration that took as long as most do, by rank."""
    whole = iterations_of(rows)
    whole.sort(key=lambda each: max(row.iteration_end - row.fp_start for row in each))
    return sorted(whole[len(whole) // 2], key=lambda row: row.rank)
