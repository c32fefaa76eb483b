"""The rows of the iteration trace: the phases of one iteration on one rank, and derived times."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hvdlite.common.settings.setting import trace_path


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
    samples: int = 0  # rows of the batches that went forward; 0: not seen


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
    fp_start, fp_end, bp_end, optimizer_time, end, _ = times
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


# The files of the iteration trace: CSV, which grows by rows, and Parquet, written at the end.
#
# The number of segments is not known in advance. When a row has more of them than the file has
# columns for, a wider CSV file is written, which then replaces the old one atomically.
CHUNK_ROWS = 10_000  # rows kept as Python objects before they become an Arrow table


# What to do with the files of parameter servers and their workers, which have other columns.
PUSHES = (
    "pushes and pulls of a parameter server, which this report does not read: open it as a table "
    "(docs/iteration_trace.md has its columns), or draw a timeline of the job by hvdlite-timeline"
)


class RowsFormatError(ValueError):
    """The error that a file is no iteration trace; the message names the file."""


class RowsFile(Protocol):
    """A file to which rows are appended."""

    path: str

    def append(self, rows: Sequence[IterationRow]) -> None:
        """Append rows; raise `OSError` when they cannot be written."""

    def close(self) -> None:
        """Complete the file; raise `OSError` when it cannot be written."""


def check_path(path: str) -> None:
    """Raise `ValueError` unless the suffix is ``.csv`` or ``.parquet``."""
    try:
        trace_path(path)
    except ValueError as error:
        raise ValueError(f"the iteration trace {path!r} {error}") from None


def open_rows(path: str) -> RowsFile:
    """Open the file `path` for writing: CSV or Parquet, by its suffix. An old file is replaced.

    Raises `ValueError` for another suffix, `OSError` when it cannot be written, and `ImportError`
    for Parquet without pyarrow.
    """
    check_path(path)
    return CsvFile(path) if path.endswith(".csv") else ParquetFile(path)


class CsvFile:
    """A CSV file; rows are in it when `append` returns."""

    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)  # A wider file replaces what a link names, not the link.
        self._segments = 0  # the number of segments that the columns have room for
        self._file = open(self.path, "w", encoding="utf-8", newline="")  # noqa: SIM115
        self._write([columns(0)])

    def append(self, rows: Sequence[IterationRow]) -> None:
        segments = max((len(row.segments) for row in rows), default=0)
        if segments > self._segments:
            self._widen(segments)
        self._write(map(self._format, rows))

    def _format(self, row: IterationRow) -> list[str]:
        formatted = [
            "" if value is None else f"{value:.9f}" if isinstance(value, float) else str(value)
            for value in cells(row)
        ]
        return [*formatted, *[""] * (len(columns(self._segments)) - len(formatted))]

    def _widen(self, segments: int) -> None:
        more = "," * (len(columns(segments)) - len(columns(self._segments)))
        part = f"{self.path}.part"
        wider = open(part, "w", encoding="utf-8", newline="")  # noqa: SIM115
        try:
            with open(self.path, encoding="utf-8", newline="") as old:
                next(old)
                csv.writer(wider, lineterminator="\n").writerow(columns(segments))
                wider.writelines(f"{line.rstrip()}{more}\n" for line in old)
            wider.flush()
            os.replace(part, self.path)
        except BaseException:
            wider.close()
            Path(part).unlink(missing_ok=True)
            raise
        self._file.close()
        self._file, self._segments = wider, segments

    def _write(self, lines: Iterable[Sequence[str]]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(lines)
        self._file.write(text.getvalue())
        self._file.flush()  # whole lines only, so that a killed run leaves a good file

    def close(self) -> None:
        self._file.close()


class ParquetFile:
    """A Parquet file; rows wait in memory, some hundred bytes each, until `close` writes them."""

    def __init__(self, path: str) -> None:
        self._arrow, self._parquet = _pyarrow()
        self.path = os.path.abspath(path)
        self._rows: list[IterationRow] = []
        self._tables: list[Any] = []
        Path(self.path).write_bytes(b"")  # an unwritable path fails now, not at the end of the run

    def append(self, rows: Sequence[IterationRow]) -> None:
        self._rows.extend(rows)
        if len(self._rows) >= CHUNK_ROWS:
            self._pack()

    def _pack(self) -> None:
        names = columns(max((len(row.segments) for row in self._rows), default=0))
        arrow = self._arrow
        types = {
            name: arrow.int64() if name in WHOLE or name.endswith("_bytes") else arrow.float64()
            for name in names
        }
        filled = (
            [*values, *[None] * (len(names) - len(values))] for values in map(cells, self._rows)
        )
        values = list(zip(*filled, strict=True)) or [()] * len(names)
        arrays = {
            name: arrow.array(column, types[name])
            for name, column in zip(names, values, strict=True)
        }
        self._tables.append(arrow.table(arrays))
        self._rows = []

    def close(self) -> None:
        if self._rows or not self._tables:
            self._pack()
        table = self._arrow.concat_tables(self._tables, promote_options="default")
        ordered = sorted(table.column_names, key=columns(table.num_columns).index)
        self._parquet.write_table(table.select(ordered), self.path)


def _pyarrow() -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise ImportError(
            "a trace in Parquet needs pyarrow: pip install 'hvdlite[parquet]', or name a .csv file"
        ) from None


# -- reading


def read_rows(path: str) -> list[IterationRow]:
    """Return the rows of a file; an incomplete last line of CSV is left out.

    Raises `OSError`, `RowsFormatError` that names the file and the place, and `ImportError`.
    """
    try:
        trace_path(path)
        records: Iterable[dict[str, Any]]
        if path.endswith(".csv"):
            text = Path(path).read_text(encoding="utf-8")
            records = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
        else:
            records = _read_parquet(path)
    except (ValueError, UnicodeDecodeError) as error:
        raise RowsFormatError(f"{path}: {error}") from None
    rows = []
    for number, record in enumerate(records, 1):
        try:
            rows.append(row_of(record))
        except KeyError as error:
            if "peer" in record:
                raise RowsFormatError(f"{path}: it holds {PUSHES}") from None
            raise RowsFormatError(f"{path}: no column {error}: is it an iteration trace?") from None
        except (TypeError, ValueError) as error:
            raise RowsFormatError(f"{path}, row {number}: {error}") from None
    return rows


def _read_parquet(path: str) -> list[dict[str, Any]]:
    _, parquet = _pyarrow()
    if os.path.getsize(path) == 0:
        raise ValueError(
            "it is empty: a Parquet file is written at the end, and this job still runs, or was "
            "ended before; name a .csv file, which grows while the job runs"
        )
    records: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return records
