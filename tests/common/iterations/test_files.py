"""Rows of the iteration trace: what is derived, and what is in the files."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.common.iterations.rows import (
    IterationRow,
    IterationTimes,
    RowsFormatError,
    SegmentTimes,
    make_row,
    open_rows,
    overlap_of,
    read_rows,
)

SCALARS = (
    "iteration", "rank", "fp_start", "fp_end", "bp_end", "iteration_end", "fp_bp_time", "tail",
    "optimizer_time", "data_time", "overlap",
)  # fmt: skip


def row(iteration: int, *segments: tuple[float, float, int], rank: int = 0) -> IterationRow:
    """Forward takes 1 s, backward 2 s, and the optimizer 0.5 s of the next 2 s."""
    start = 10.0 * iteration
    marks = IterationTimes(start, start + 1, start + 3, 0.5, start + 5)
    times = [SegmentTimes(start + a, start + b, n) for a, b, n in segments]
    return make_row(iteration, rank, marks, times, None if iteration == 0 else start - 4, 0.0)


def test_what_is_derived() -> None:
    made = row(1, (3.5, 4.0, 7), (2.0, 3.5, 100))
    assert made.fp_bp_time == 3
    assert made.tail == 1.5  # 2 s after backward, 0.5 s of them the optimizer's own
    assert made.data_time == 4
    assert made.overlap == 0.5  # 1 s of 2 s
    assert [each.bytes for each in made.segments] == [100, 7]  # in the order in which they ran
    assert row(0).data_time is None and row(0).overlap is None


def test_the_common_clock_moves_times_and_no_durations() -> None:
    marks = IterationTimes(1.0, 2.0, 3.0, 0.5, 5.0)
    moved = make_row(0, 0, marks, [SegmentTimes(2.5, 3.5, 1)], 0.25, 100.0)
    plain = make_row(0, 0, marks, [SegmentTimes(2.5, 3.5, 1)], 0.25, 0.0)
    assert moved[2:6] == (101.0, 102.0, 103.0, 105.0)
    assert moved.segments == (SegmentTimes(102.5, 103.5, 1),)
    assert moved[6:11] == plain[6:11] == (2.0, 1.5, 0.5, 0.75, 0.5)


def test_what_was_not_seen_is_none() -> None:
    made = make_row(
        0, 0, IterationTimes(1.0, None, None, None, 5.0), [SegmentTimes(2, 3, 1)], None, 0.0
    )
    assert made.fp_end is made.bp_end is made.fp_bp_time is made.tail is made.overlap is None


times = st.floats(0, 100, allow_nan=False)


@given(st.lists(st.tuples(times, times), max_size=5), times)
def test_overlap_is_a_share(spans: list[tuple[float, float]], bp_end: float) -> None:
    segments = [SegmentTimes(min(span), max(span), 1) for span in spans]
    share = overlap_of(segments, bp_end)
    total = math.fsum(each.end - each.start for each in segments)
    if total == 0:
        assert share is None
    else:
        after = math.fsum(
            each.end - max(each.start, bp_end) for each in segments if each.end > bp_end
        )
        assert share == pytest.approx(1 - after / total, abs=1e-9)


# -- files


def suffixes() -> list[str]:
    return [".csv", ".parquet"]


@pytest.mark.parametrize("suffix", suffixes())
def test_rows_come_back_however_many_segments_each_has(tmp_path: Path, suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="the extra 'parquet' is not installed")
    segments = [(1.0, 1.5, 10), (2.0, 3.0, 1 << 40), (3.5, 4.0, 0)]
    rows = [row(k, *segments[:n]) for k, n in enumerate([1, 0, 3, 2])]
    path = str(tmp_path / f"a{suffix}")
    file = open_rows(path)
    file.append(rows[:2])
    file.append([])
    file.append(rows[2:])
    file.close()
    assert read_rows(path) == rows


def test_csv_has_the_columns_of_the_reference_and_is_good_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    file = open_rows(str(path))
    assert read_rows(str(path)) == []
    for count in (1, 2):
        file.append([row(0, *[(1.0, 1.5, 10)] * count)])
        with path.open(newline="") as text:  # not closed yet: as after a kill
            lines = list(csv.reader(text))
        parts = [
            f"allreduce_{k}_{w}" for k in range(1, count + 1) for w in ("start", "end", "bytes")
        ]
        assert lines[0] == [*SCALARS, *parts]
        assert all(len(line) == len(lines[0]) for line in lines)
    file.close()
    assert list(tmp_path.iterdir()) == [path]


def test_a_last_line_that_is_not_complete_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    file = open_rows(str(path))
    file.append([row(0), row(1)])
    file.close()
    path.write_text(path.read_text()[:-5])
    assert read_rows(str(path)) == [row(0)]


def test_parquet_is_written_at_the_end_in_columns_of_numbers(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra 'parquet' is missing")
    path = tmp_path / "a.parquet"
    file = open_rows(str(path))
    file.append([row(0), row(1, (1.0, 1.5, 10))])
    file.close()
    table = parquet.read_table(path)
    assert table.column_names[:11] == list(SCALARS)
    assert table.column("allreduce_1_bytes").to_pylist() == [None, 10]
    assert {str(table.schema.field(name).type) for name in SCALARS} == {"int64", "double"}


@pytest.mark.parametrize("path", ["a.txt", "a", "a.csv.gz", ""])
def test_another_suffix_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"\.csv or \.parquet"):
        open_rows(path)


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'hvdlite\[parquet\]'"):
        open_rows(str(tmp_path / "a.parquet"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", suffixes())
def test_a_path_that_cannot_be_written_is_an_error_at_once(tmp_path: Path, suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="the extra 'parquet' is not installed")
    with pytest.raises(OSError, match="none"):
        open_rows(str(tmp_path / "none" / f"a{suffix}"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b\n1,2\n", "no column 'iteration'"),
        (",".join(SCALARS) + "\n" + ",".join("x" * 11) + "\n", "row 1"),
        (",".join(SCALARS) + "\n" + "," * 10 + "\n", "row 1: iteration is empty"),
        (",".join(SCALARS) + "\n0,0\n", "row 1"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_name(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(RowsFormatError, match=problem) as caught:
        read_rows(str(path))
    assert str(path) in str(caught.value)


def test_a_parquet_file_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra 'parquet' is not installed")
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 or not")
    with pytest.raises(RowsFormatError, match=r"a\.parquet"):
        read_rows(str(path))


def test_the_parquet_file_of_a_job_that_was_killed_says_what_to_use(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra 'parquet' is not installed")
    path = str(tmp_path / "a.parquet")
    open_rows(path).append([row(0)])
    with pytest.raises(RowsFormatError, match=r"a\.parquet: it is empty: .* ended.* a \.csv file"):
        read_rows(path)


def test_a_csv_file_that_gets_wider_stays_behind_its_link(tmp_path: Path) -> None:
    (tmp_path / "a.csv").symlink_to("target.csv")
    file = open_rows(str(tmp_path / "a.csv"))
    rows = [row(0), row(1, (1.0, 1.5, 10))]
    for each in rows:
        file.append([each])
    file.close()
    assert (tmp_path / "a.csv").is_symlink() and read_rows(str(tmp_path / "target.csv")) == rows
