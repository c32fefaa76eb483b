"""The rows of the iteration trace: the phases of one iteration on one rank, and derived times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class SegmentTimes(NamedTuple):
    """One reduction of gradients; times are seconds of the common clock."""

    start: float
    end: float
    bytes: int  # the bytes of this rank's gradients in it


class IterationRow(NamedTuple):
    """One iteration on one rank; times are seconds of rank 0's monotonic clock, None: not seen."""

    iteration: int  # from 0, counted by each rank
    rank: int
    fp_start: float  # forward begins
    fp_end: float | None  # the model has its output; the loss may still follow
    bp_end: float | None  # backward has ended: this rank has all its gradients
    iteration_end: float  # the optimizer has made its step
    fp_bp_time: float | None  # from fp_start to bp_end
    tail: float | None  # from bp_end to iteration_end, less optimizer_time
    optimizer_time: float | None  # the optimizer's own step, without waiting for other ranks
    data_time: float | None  # from the end of the previous iteration; None for the first
    overlap: float | None  # share of the communication that lies before bp_end, 0 to 1
    segments: tuple[SegmentTimes, ...]  # in the order in which they ran


class IterationTimes(NamedTuple):
    """The measured times of one iteration, in seconds of this rank's monotonic clock."""

    fp_start: float | None
    fp_end: float | None
    bp_end: float | None
    optimizer_time: float | None  # a duration
    iteration_end: float


def make_row(
    iteration: int,
    rank: int,
    times: IterationTimes,
    segments: Sequence[SegmentTimes],
    previous_end: float | None,
    shift: float,
) -> IterationRow:
    """Return a row on the common clock, which is `shift` seconds ahead of the arguments' clock.

    `previous_end` is the end of the previous iteration. The beginning of this one must be known.
    """
    fp_start, fp_end, bp_end, optimizer_time, end = times
    assert fp_start is not None
    ordered = sorted(segments)
    return IterationRow(
        iteration,
        rank,
        fp_start + shift,
        None if fp_end is None else fp_end + shift,
        None if bp_end is None else bp_end + shift,
        end + shift,
        None if bp_end is None else bp_end - fp_start,
        None if bp_end is None else end - bp_end - (optimizer_time or 0.0),
        optimizer_time,
        None if previous_end is None else fp_start - previous_end,
        None if bp_end is None else overlap_of(ordered, bp_end),
        tuple(SegmentTimes(start + shift, stop + shift, size) for start, stop, size in ordered),
    )


def overlap_of(segments: Sequence[SegmentTimes], bp_end: float) -> float | None:
    """Return the share of the communication before `bp_end`; None without communication."""
    total = sum(segment.end - segment.start for segment in segments)
    hidden = sum(max(min(segment.end, bp_end) - segment.start, 0.0) for segment in segments)
    return hidden / total if total > 0 else None


# -- as columns of a table

_PARTS = SegmentTimes._fields
SCALARS = IterationRow._fields[:-1]
WHOLE = ("iteration", "rank")  # the columns of integers, besides those of bytes


def columns(segments: int) -> list[str]:
    """Return the column names of rows with up to `segments` segments, numbered from 1."""
    parts = [f"allreduce_{k + 1}_{part}" for k in range(segments) for part in _PARTS]
    return [*SCALARS, *parts]


def cells(row: IterationRow) -> list[Any]:
    """Return the row's values, in the order of `columns`."""
    return [*row[:-1], *(value for segment in row.segments for value in segment)]


def row_of(values: Mapping[str, Any]) -> IterationRow:
    """Return the row of these columns; an empty cell is None or "".

    Raises `ValueError` for a cell that is no number or must not be empty, and `KeyError` for a
    missing column.
    """

    def number(name: str) -> Any:
        value = values[name]
        if value is None or value == "":
            return None
        return int(value) if name in WHOLE or name.endswith("_bytes") else float(value)

    scalars = {name: number(name) for name in SCALARS}
    for name in (*WHOLE, "fp_start", "iteration_end"):
        if scalars[name] is None:
            raise ValueError(f"{name} is empty")
    segments = []
    k = 1
    while f"allreduce_{k}_start" in values:
        times = [number(f"allreduce_{k}_{part}") for part in _PARTS]
        if None not in times:
            segments.append(SegmentTimes(*times))
        k += 1
    return IterationRow(**scalars, segments=tuple(segments))
