"""hvdlite-trace report: tables, picture and page of traces that are known."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hvdlite.common.iterations.rows import (
    IterationRow,
    IterationTimes,
    SegmentTimes,
    make_row,
    open_rows,
)
from hvdlite.common.timeline.recorder import path_of_rank
from hvdlite.tools import trace_plot, trace_report
from hvdlite.tools.trace_cli import main
from hvdlite.tools.trace_summary import median_iteration, read_trace, summarize, typical_iteration

rich = pytest.importorskip("rich", reason="the extra 'trace' is not installed")
MS = 1e-3
MIB = 1 << 20


def row(rank: int, iteration: int, slower: float = 0.0, segments: int = 2) -> IterationRow:
    """In ms: forward 10, backward 20, the last segment until 40, the optimizer until 42."""
    start = iteration * 100.0
    marks = IterationTimes(
        start * MS, (start + 10) * MS, (start + 30 + slower) * MS, 2 * MS, (start + 42) * MS
    )
    reductions = [
        SegmentTimes((start + 20) * MS, (start + 25) * MS, 5 * MIB),
        SegmentTimes((start + 30 + slower) * MS, (start + 40) * MS, 5 * MIB),
    ]
    before = None if iteration == 0 else (start - 58) * MS
    return make_row(iteration, rank, marks, reductions[:segments], before, 7.0)


def write(folder: Path, ranks: int = 3, iterations: int = 5) -> str:
    """A trace in which rank 2 computes 4 ms longer."""
    path = str(folder / "t.csv")
    for rank in range(ranks):
        file = open_rows(path_of_rank(path, rank))
        file.append([row(rank, k, 4.0 if rank == 2 else 0.0) for k in range(iterations)])
        file.close()
    return path


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def lines_of(output: str) -> dict[str, list[str]]:
    """Cells of the tables by the first cell of their line."""
    cells = ([cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines())
    return {line[0]: line[1:] for line in cells if line}


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", write(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "5 iterations of 3 ranks" in output
    lines = lines_of(output)
    assert lines["computation"][:3] == ["30.000 ms", "2", "4.000 ms"]
    assert lines["tail"][0] == "10.000 ms"
    assert lines["optimizer"][0] == "2.000 ms"
    assert lines["data"][0] == "58.000 ms"
    assert lines["overlap"][0] == "33%"  # 5 ms of 15
    assert lines["1"] == ["20.000 ms", "5.000 ms", "5.0 MiB", "1000.0 MiB/s", "0", "0.000 ms"]
    assert lines["2"][:4] == ["30.000 ms", "10.000 ms", "5.0 MiB", "500.0 MiB/s"]
    assert "move the last cut later" in output
    assert "hvdlite-run -np 3 --segmentation size:80,20 python train.py" in output


def test_names_with_wildcards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are none of a pattern: here brackets in the folder and in the file."""
    (tmp_path / "run[1]").mkdir()
    rows = len(read_trace(write(tmp_path / "run[1]")).rows)
    assert rows == 15
    (tmp_path / "run[1]").rename(tmp_path / "run*")
    for rank in range(3):
        (tmp_path / "run*" / f"t.rank{rank}.csv").rename(tmp_path / "run*" / f"[t].rank{rank}.csv")
    assert len(read_trace(str(tmp_path / "run*" / "[t].csv")).rows) == rows
    monkeypatch.chdir(tmp_path / "run*")
    assert len(read_trace("[t].rank1.csv").rows) == rows


def test_a_file_of_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    assert main(["report", str(tmp_path / "t.rank2.csv")]) == 0
    assert "5 iterations of 3 ranks" in capsys.readouterr().out  # it stands for all of them
    for rank in range(2):
        (tmp_path / f"t.rank{rank}.csv").unlink()
    assert main(["report", str(tmp_path / "t.rank2.csv")]) == 0
    lines = lines_of(capsys.readouterr().out)
    assert lines["computation"][:3] == ["34.000 ms", "-", "-"]


def test_only_files_of_the_trace_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, ranks=12)
    for name in ("t.rankx.csv", "t.rank0.old.csv", "tt.rank0.csv", "t.rank0.csv.part"):
        (tmp_path / name).write_text("not a trace")
    assert {each.rank for each in read_trace(path).rows} == set(range(12))


def test_files_that_an_earlier_run_with_more_ranks_has_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, ranks=12, iterations=3)
    for rank in range(2):  # later on the same clock; rank 1 ends early
        file = open_rows(path_of_rank(path, rank))
        file.append([row(rank, 100 + k) for k in range(3 - rank)])
        file.close()
    assert main(["report", path]) == 0
    printed = capsys.readouterr()
    assert "3 iterations of 2 ranks" in printed.out
    left = ", ".join(path_of_rank(path, rank) for rank in range(2, 12))
    assert printed.err == f"hvdlite-trace: left out, since they are of another run: {left}\n"


def test_iterations_with_other_segments_are_left_out_of_the_table(tmp_path: Path) -> None:
    rows = [row(0, k, segments=1 if k == 0 else 2) for k in range(4)]
    summary = summarize(rows)
    assert len(summary.segments) == 2 and summary.alike == 0.75
    assert "75% of the rows" in " ".join(trace_report.make_report(rows).notes)


def test_cuts_of_as_many_segments_are_told_apart() -> None:
    rows = [row(0, k) for k in range(9)]
    for each, (first, last) in zip(range(9), [(3, 7)] * 5 + [(6, 4)] * 4, strict=True):
        sizes = zip(rows[each].segments, (first << 20, last << 20), strict=True)
        cut = tuple(segment._replace(bytes=size) for segment, size in sizes)
        rows[each] = rows[each]._replace(segments=cut)
    summary = summarize(rows)
    assert [each.bytes >> 20 for each in summary.segments] == [3, 7]
    assert summary.alike == pytest.approx(5 / 9)


def test_advice_is_about_the_rank_that_the_others_wait_for() -> None:
    rows = [row(rank, k, 9.0 * rank) for rank in range(2) for k in range(3)]
    typical = typical_iteration(rows)
    assert typical is not None
    assert typical.bp_end == pytest.approx(39 * MS) and typical.wait == pytest.approx(9 * MS)
    assert typical.reductions[-1].end == pytest.approx(40 * MS)
    report = trace_report.make_report(rows)
    assert report.advice.rule == 0 and "nothing to gain" in report.advice.why
    assert "9.000 ms after the first" in report.notes[0]


def test_a_rank_that_is_always_late_is_told_from_ranks_that_take_turns() -> None:
    def note(late: int) -> str:
        rows = [
            row(rank, k, 9.0 if rank == late * k % 2 else 0.0) for rank in (0, 1) for k in range(4)
        ]
        return trace_report.make_report(rows).notes[0]

    assert "Rank 0 is last in 4 of 4 iterations: its computation takes 39.000 ms" in note(late=0)
    assert "Now one rank is late, now another (rank 0 is last in 2 of 4" in note(late=1)


def test_a_rank_whose_data_come_late_is_named_and_not_the_one_that_waits_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In ms: 2 of data and 10 of computation; rank 1 takes 32 of data; all end 4 after its end."""
    for rank, data in ((0, 2), (1, 32)):
        rows = []
        for k in range(6):
            before, start = k * 49, k * 49 + data
            last = before + 32 + 10
            marks = IterationTimes(
                start * MS, (start + 4) * MS, (start + 10) * MS, 1 * MS, (last + 7) * MS
            )
            reductions = [SegmentTimes(last * MS, (last + 4) * MS, MIB)]
            rows.append(make_row(k, rank, marks, reductions, before * MS, 0.0))
        file = open_rows(path_of_rank(str(tmp_path / "t.csv"), rank))
        file.append(rows)
        file.close()
    assert main(["report", str(tmp_path / "t.csv")]) == 0
    output = capsys.readouterr().out
    lines = lines_of(output)
    assert lines["data"][1:3] == ["1", "30.000 ms"]
    assert lines["iteration"][1:3] == lines["tail"][1:3] == ["", ""]
    assert "Rank 1 is last in 6 of 6 iterations: its data takes 32.000 ms" in output
    assert "2.000 ms (data: between two iterations" in output
    assert "Now one rank is late" not in output
    assert "--segmentation" not in output and "wait 30 ms for the last one" in output


def test_iterations_of_other_lengths_do_not_blur_what_comes_after_backward() -> None:
    rows = []
    for k, computed in enumerate([20, 400, 30]):  # communication ends 5 ms after it each time
        marks = IterationTimes(k * 1.0, None, k + computed * MS, None, k + (computed + 6) * MS)
        last = SegmentTimes(k + computed * MS, k + (computed + 5) * MS, 1)
        rows.append(make_row(k, 0, marks, [last], None, 0.0))
    typical = typical_iteration(rows)
    assert typical is not None
    assert typical.reductions[0].end - typical.bp_end == pytest.approx(5 * MS)
    assert typical.fp_end is None


def test_without_the_end_of_backward_there_are_tables_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = open_rows(str(tmp_path / "t.csv"))
    marks = IterationTimes(1.0, None, None, None, 1.5)
    file.append([make_row(0, 0, marks, [SegmentTimes(1.1, 1.2, 5)], None, 0.0)])
    file.close()
    assert main(["report", str(tmp_path / "t.csv")]) == 0
    output = capsys.readouterr().out
    assert lines_of(output)["tail"][0] == "-" and "backward_done()" in output


def test_the_median_iteration_is_one_that_all_ranks_have() -> None:
    rows = [row(rank, k) for rank in range(3) for k in range(4)] + [row(0, 9)]
    chosen = median_iteration(rows)
    assert [each.rank for each in chosen] == [0, 1, 2]
    assert len({each.iteration for each in chosen}) == 1


@pytest.mark.parametrize(
    ("name", "problem"),
    [("none.csv", "none.rank0.csv"), ("empty.csv", "no iterations"), ("bad.csv", "bad.csv")],
)
def test_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, problem: str
) -> None:
    open_rows(str(tmp_path / "empty.csv")).close()
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    assert main(["report", str(tmp_path / name)]) == 1
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "words"),
    [("rich.console", []), ("matplotlib.figure", ["--html"]), ("matplotlib.figure", ["--picture"])],
)
def test_what_is_missing_is_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    words: list[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    output = [str(tmp_path / "out.svg")] if words else []
    assert main(["report", write(tmp_path), *words, *output]) == 1
    assert "pip install 'hvdlite[trace]'" in capsys.readouterr().err
    assert not (tmp_path / "out.svg").exists()


def test_a_picture_has_forward_backward_and_segments_of_each_rank() -> None:
    computation, communication = trace_plot.bars_of(row(0, 0))
    ms = [
        (bar.kind, round(1000 * (bar.start - 7)), round(1000 * (bar.end - 7)))
        for bar in computation
    ]
    assert ms == [("forward", 0, 10), ("backward", 10, 30), ("optimizer", 40, 42)]
    assert [(bar.kind, bar.text) for bar in communication] == [
        ("segment", "1"), ("segment, after backward", "2")
    ]  # fmt: skip


@pytest.mark.thorough
def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'trace' is not installed")
    path = write(tmp_path)
    for suffix, begin in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        picture = tmp_path / f"a.{suffix}"
        assert main(["report", path, "--picture", str(picture)]) == 0
        assert picture.read_bytes().startswith(begin)
    assert main(["report", path, "--picture", str(tmp_path / "a.jpg")]) == 1
    assert "a.jpg" in capsys.readouterr().err and not (tmp_path / "a.jpg").exists()


class _Page(HTMLParser):
    """Collects what a page would load, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str | None] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_has_all_in_one_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'trace' is not installed")
    page = tmp_path / "a.html"
    assert main(["report", write(tmp_path), "--html", str(page)]) == 0
    text = page.read_text()
    parsed = _Page()
    parsed.feed(text)
    assert {"table", "svg"} <= parsed.tags and "script" not in parsed.tags
    assert not re.search(r"url\((?!#)", text)
    assert "--segmentation size:80,20" in parsed.text and "1000.0 MiB/s" in parsed.text


def test_the_files_of_a_parameter_server_are_no_iterations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = tmp_path / "t.worker0.csv"
    columns = "kind,table,peer,clock,version,stale,start,end,bytes"
    worker.write_text(f"{columns}\npull,optimizer,server 0,0,0,0,1.5,2.5,36\n")
    for name in ("t.csv", "t.worker0.csv"):
        assert main(["report", str(tmp_path / name)]) == 1
        assert f"{worker}: it holds pushes and pulls of a parameter" in capsys.readouterr().err
