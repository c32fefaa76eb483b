"""hvdlite-timeline: files of several ranks on one clock, and files that are wrong."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hvdlite.common.timeline.recorder import Timeline
from hvdlite.tools.timeline_cli import main
from hvdlite.tools.timeline_plot import collect
from hvdlite.tools.timeline_reader import check, is_cut_off, read_events

Event = dict[str, Any]
HEAD = (
    '{"name": "process_name", "ph": "M", "pid": 0, '
    '"args": {"start_time_since_epoch_in_micros": 1000000}}'
)
TRACK = '{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "a"}}'


def write(
    path: Path, rank: int, *, epoch: int = 0, monotonic: int = 0, offset: int | None = None
) -> str:
    """A file in which a tensor is negotiated at 10 us and reduced from 20 to 30 us."""
    args: Event = {"start_time_since_epoch_in_micros": epoch, "rank": rank}
    args["start_monotonic_in_micros"] = monotonic
    if offset is not None:
        args["clock_offset_in_micros"] = offset
    events: list[Event] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": args},
        {"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "[engine]"}},
        {"name": "process_sort_index", "ph": "M", "pid": 1, "args": {"sort_index": -2}},
        {"name": "process_name", "ph": "M", "pid": 2, "args": {"name": "a"}},
        {"name": "process_sort_index", "ph": "M", "pid": 2, "args": {"sort_index": 2}},
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 10, "pid": 2},
        {"ph": "X", "name": "0", "ts": 10, "pid": 2, "dur": 0},
        {"ph": "E", "ts": 11, "pid": 2},
        {"ph": "i", "name": "CYCLE_START", "ts": 12, "s": "g"},
        {"ph": "B", "name": "ALLREDUCE", "ts": 20, "pid": 2},
        {"ph": "E", "ts": 30, "pid": 2, "args": {"dtype": "int8", "shape": "[]"}},
    ]
    path.write_text(json.dumps(events))
    return str(path)


def merge(tmp_path: Path, *files: str) -> list[Event]:
    output = tmp_path / "merged.json"
    assert main(["merge", *files, "-o", str(output)]) == 0
    events: list[Event] = json.loads(output.read_text())
    assert check(events).problems == []
    return events


def starts(events: list[Event], name: str = "ALLREDUCE") -> dict[str, int]:
    """When `name` begins on each track, by the track's name."""
    tracks = {e["pid"]: e["args"]["name"] for e in events if "name" in e.get("args", {})}
    return {tracks[e["pid"]]: e["ts"] for e in events if e.get("name") == name}


def test_merge_uses_the_offsets_of_the_clocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Rank 1's clock is 4 s behind rank 0's; its file begins 5 us after rank 0's.
    one = write(tmp_path / "0.json", 0, epoch=77, monotonic=9_000_000, offset=0)
    two = write(tmp_path / "1.json", 1, epoch=1, monotonic=5_000_005, offset=4_000_000)
    assert starts(merge(tmp_path, one, two)) == {"rank 0: a": 20, "rank 1: a": 25}
    assert capsys.readouterr().err == ""


def test_merge_starts_at_the_earliest_file(tmp_path: Path) -> None:
    one = write(tmp_path / "0.json", 0, monotonic=100, offset=0)
    two = write(tmp_path / "1.json", 1, monotonic=0, offset=0)
    assert starts(merge(tmp_path, one, two)) == {"rank 0: a": 120, "rank 1: a": 20}


def test_merge_without_offsets_takes_the_wall_clocks_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write(tmp_path / "0.json", 0, epoch=1_000_000, monotonic=5, offset=0)
    two = write(tmp_path / "1.json", 1, epoch=1_000_300, monotonic=5)
    events = merge(tmp_path, one, two)
    assert starts(events) == {"rank 0: a": 20, "rank 1: a": 320}
    assert events[0]["args"]["start_time_since_epoch_in_micros"] == 1_000_000
    assert "wall clocks" in capsys.readouterr().err


def test_merge_keeps_tracks_apart_and_each_ranks_together(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{rank}.json", rank, offset=0) for rank in range(3)]
    events = merge(tmp_path, *files)
    order = {}
    for event in events:
        if event["ph"] == "M" and "sort_index" in event["args"]:
            order[event["args"]["sort_index"]] = event["pid"]
    names = {e["pid"]: e["args"]["name"] for e in events if "name" in e.get("args", {})}
    assert [names[order[index]] for index in sorted(order)] == [
        f"rank {rank}: {name}" for rank in range(3) for name in ("[engine]", "a")
    ]
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times)
    marks = [event["args"] for event in events if event.get("name") == "CYCLE_START"]
    assert marks == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def test_merge_of_files_that_a_timeline_wrote(tmp_path: Path) -> None:
    files = []
    for rank in range(2):
        timeline = Timeline(rank)
        timeline.set_clock_offset(0.0)
        files.append(str(tmp_path / f"{rank}.json"))
        timeline.record_to(files[-1])
        for tensor in ("a", "b"):
            timeline.start(tensor, "allreduce")
            timeline.end(tensor, "float32", (1,))
        timeline.close()
    began = starts(merge(tmp_path, *files))
    assert sorted(began, key=lambda name: began[name]) == [
        "rank 0: a", "rank 0: b", "rank 1: a", "rank 1: b"
    ]  # fmt: skip


def test_a_merge_that_fails_leaves_no_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write(tmp_path / "good.json", 0, offset=0)
    (tmp_path / "bad.json").write_text(f"[\n{HEAD},\n{{]\n")
    before = sorted(tmp_path.iterdir())
    assert main(["merge", good, str(tmp_path / "bad.json"), "-o", str(tmp_path / "out")]) == 1
    assert main(["merge", good, str(tmp_path / "none.json"), "-o", str(tmp_path / "out")]) == 1
    assert main(["merge", good, "-o", str(tmp_path / "no" / "out")]) == 1
    assert sorted(tmp_path.iterdir()) == before
    error = capsys.readouterr().err
    assert "bad.json" in error and "none.json" in error and str(tmp_path / "no" / "out") in error


def test_merge_writes_to_a_device_without_replacing_it(tmp_path: Path) -> None:
    good = write(tmp_path / "good.json", 0, offset=0)
    assert main(["merge", good, "-o", "/dev/null"]) == 0
    assert Path("/dev/null").is_char_device()


def test_check_says_what_is_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", write(tmp_path / "a.json", 0)]) == 0
    assert "12 events on 2 tracks, 1 collectives completed" in capsys.readouterr().out


def test_check_says_where_the_time_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In ms, on rank 3: a is negotiated from 0 to 10, b from 5 to 20; both run from 30 to 100."""
    at = [
        (0, "B", 2, "NEGOTIATE_ALLREDUCE"), (1, "X", 2, "0"), (5, "B", 4, "NEGOTIATE_ALLREDUCE"),
        (6, "X", 4, "3"), (10, "X", 2, "3"), (10, "E", 2, ""), (20, "X", 4, "0"), (20, "E", 4, ""),
        (30, "B", 2, "ALLREDUCE"), (30, "B", 4, "ALLREDUCE"), (40, "B", 2, "SHM"),
        (60, "E", 2, ""), (60, "B", 4, "SHM"), (65, "E", 2, ""), (90, "E", 4, ""),
        (100, "E", 4, ""), (200, "i", 2, "CYCLE_START"),
        (200, "B", 4, "NEGOTIATE_ALLREDUCE"), (200, "X", 4, "0"), (200, "X", 4, "3"),
        (200, "E", 4, ""),
    ]  # fmt: skip
    names = {1: "[engine]", 2: "a", 4: "b"}
    events: list[Event] = json.loads(Path(write(tmp_path / "a.json", 3)).read_text())[:1]
    events += [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
        for pid, name in names.items()
    ]
    events += [{"ph": ph, "ts": 1000 * ts, "pid": pid, "name": name} for ts, ph, pid, name in at]
    events.insert(4, {"ph": "B", "ts": 0, "pid": 1, "name": "EXECUTE"})
    path = tmp_path / "a.json"
    path.write_text(json.dumps(events))
    assert main(["check", str(path)]) == 0
    shares = "negotiation 20.0 ms (10%), queue 45.0 ms (22%), exchange 50.0 ms (25%)"
    last = "last to be ready most often: rank 3, 2 of 3 times"
    assert f"rank 3, of 200.0 ms: {shares}\n{last}\n" in capsys.readouterr().out
    assert main(["merge", str(path), "-o", str(tmp_path / "m.json")]) == 0
    assert main(["check", str(tmp_path / "m.json")]) == 0
    assert f"rank 3, of 200.0 ms: {shares}\n{last}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        ('{"ph": "E", "ts": 1, "pid": 1}', "the end of what has not begun"),
        (
            '{"ph": "X", "name": "0", "ts": 1, "pid": 1, "dur": 0}',
            "a rank is ready outside a negotiation",
        ),
        ('{"ph": "B", "name": "ALLREDUCE", "ts": 1, "pid": 2}', "pid 2 has no name"),
        ('{"ph": "B", "name": "ALLREDUCE", "ts": -1, "pid": 1}', "ts is no whole number"),
        ('{"ph": "B", "name": "ALLREDUCE", "pid": 1}', "ts is no whole number"),
        ('{"ph": "B", "ts": 1, "pid": 1}', "no name"),
        ('{"ph": "?", "ts": 1, "pid": 1}', "unknown phase '?'"),
        ('{"ph": "M", "pid": 1}', "metadata without args"),
    ],
)
def test_check_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], event: str, problem: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(f"[{HEAD}, {TRACK}, {event}]")
    assert main(["check", str(path)]) == 1
    assert f"event 2: {problem}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "'[' expected at its beginning: the file is empty"),
        ('{"traceEvents": []}', "'[' expected at its beginning, not '{\"traceEvents\": []}'"),
        (f"[{HEAD}, {HEAD[:20]}", "line 1 is not an event"),  # cut off before a line was whole
        (f"[{HEAD}]]", "line 1 is not an event"),
        (f"[\n{HEAD}\n]\n]", "line 4: text after the final ']'"),
        (f"[\n{HEAD},\n{HEAD[:20]},\n{HEAD}\n]", "line 3 is not an event"),
        (f"[\n{HEAD},\n{HEAD[:20]}\n", "line 3 is not an event"),
        ("[" + "[" * 100_000 + "\n]", "line 1 is not an event"),
        ("[1]", "1 is not an event"),
        (f"[\n {HEAD}, 1\n]", "1 is not an event"),
        ('[{"pid": "x"}]', "is not an event"),
        (b"[\xff]", "line 1 is not an event: 'utf-8' codec"),
    ],
)
def test_a_broken_file_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | bytes, problem: str
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["check", str(path)]) == 1
    error = capsys.readouterr().err
    assert str(path) in error and problem in error


def test_check_counts_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    drop = '{"ph": "i", "name": "EVENTS_DROPPED", "ts": 1, "s": "g", "args": {"count": 5}}'
    begin = '{"ph": "B", "name": "ALLREDUCE", "ts": 2, "pid": 1}'
    path.write_text(f"[{HEAD}, {TRACK}, {drop}, {begin}]")
    assert main(["check", str(path)]) == 0
    output = capsys.readouterr().out
    assert "5 events were dropped" in output and "1 spans have no end" in output


def test_a_file_that_another_tool_has_laid_out_anew_is_read(tmp_path: Path) -> None:
    timeline = Timeline.open(str(tmp_path / "a.json"), 0)
    for tensor in ("a", "b"):
        timeline.segment_start([tensor], 12, "allreduce")  # events with arrays inside
        timeline.start(tensor, "allreduce")
        timeline.end(tensor, "float32", (2, 3))
    timeline.close()
    events = json.loads((tmp_path / "a.json").read_text())
    again = tmp_path / "again.json"
    lines = [json.dumps(event) for event in events]
    for layout in (
        json.dumps(events),
        json.dumps(events) + "\n",
        json.dumps(events, indent=2),
        json.dumps(events, indent=0),
        "[" + ",\n".join(lines) + "]",
        "[\n" + ",\n".join(lines[:4]) + ",\n" + ",".join(lines[4:]) + "\n]\n",
        "[\n" + ",\n".join(lines[:4]) + ",\n" + ", ".join(lines[4:]) + "]",
        "\n [\n\n" + "\n,".join(lines) + "\n]\n\n",
        ("[\r\n" + ",\r\n".join(lines) + "\r\n]\r\n"),
    ):
        again.write_text(layout, newline="")
        assert list(read_events(str(again))) == events
        assert not is_cut_off(str(again))


@pytest.mark.thorough
def test_a_file_that_is_cut_off_anywhere_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    timeline = Timeline.open(str(tmp_path / "a.json"), 0)
    timeline.segment_start(["a"], 12, "allreduce")
    timeline.start("a", "allreduce")
    timeline.end("a", "float32", (2, 3))
    timeline.close()
    content = (tmp_path / "a.json").read_bytes()
    events = json.loads(content)
    part = tmp_path / "part.json"
    first_whole = content.index(b"}}") + 2  # the head: its line has no comma yet
    for size in range(first_whole, len(content) - 2):
        part.write_bytes(content[:size])
        whole = content[:size].count(b"\n") - 1  # the first line is the bracket
        read = list(read_events(str(part)))
        assert read == events[: len(read)]
        assert whole <= len(read) <= whole + 1  # a last line may lack nothing but its newline


def test_what_is_cut_off_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text(f"[\n{HEAD},\n{TRACK},\n{TRACK[:30]}")
    assert main(["check", str(path)]) == 0
    output = capsys.readouterr()
    assert "2 events on 1 tracks" in output.out
    assert f"{path} is cut off" in output.err
    assert main(["merge", str(path), "-o", str(tmp_path / "merged.json")]) == 0
    assert f"{path} is cut off" in capsys.readouterr().err
    path.write_text(f"[\n{HEAD},\n{TRACK}\n]\n")
    assert main(["check", str(path)]) == 0
    assert capsys.readouterr().err == ""


def test_a_pipe_is_read_in_any_layout(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    for layout in (f"[\n{HEAD},\n{TRACK}\n]\n", f"[{HEAD}, {TRACK}]"):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        writer = threading.Thread(target=path.write_text, args=(layout,))
        writer.start()
        assert list(read_events(str(path))) == [json.loads(HEAD), json.loads(TRACK)]
        writer.join(timeout=60)
        assert not writer.is_alive()


def test_a_picture_has_the_engine_above_the_tensors(tmp_path: Path) -> None:
    timeline = Timeline.open(str(tmp_path / "a.json"), 0)
    timeline.negotiate_start("a", "allreduce")
    timeline.rank_ready("a", 0)
    timeline.segment_start(["a"], 12, "allreduce")
    timeline.engine("EXECUTE")
    timeline.start("a", "allreduce")
    timeline.activity_start(["a"], "SHM_ALLREDUCE")
    timeline.close()
    rows = collect(read_events(str(tmp_path / "a.json")))
    assert [row.name for row in rows] == ["[engine]", "[segments]", "a"]
    spans = sorted(rows[2].spans, key=lambda span: (span.start, span.depth))
    assert [(span.name, span.depth) for span in spans] == [
        ("NEGOTIATE_ALLREDUCE", 0), ("ALLREDUCE", 0), ("SHM_ALLREDUCE", 1)
    ]  # fmt: skip
    assert len(rows[2].ticks) == 1 and rows[1].spans[0].bytes == 12


def test_a_picture_of_several_ranks_has_the_rows_of_a_tensor_together(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{rank}.json", rank, offset=0) for rank in range(12)]
    merge(tmp_path, *files)
    rows = collect(read_events(str(tmp_path / "merged.json")))
    assert [row.name for row in rows] == [f"rank {rank}: a" for rank in range(12)]


def test_a_picture_shows_only_the_window(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", 0)
    (row,) = collect(read_events(path), (0.012, None))
    assert [span.name for span in row.spans] == ["ALLREDUCE"] and row.ticks == []
    (row,) = collect(read_events(path), (None, 0.015))
    assert [span.name for span in row.spans] == ["NEGOTIATE_ALLREDUCE"]


def test_draw_without_matplotlib_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = write(tmp_path / "a.json", 0)
    assert main(["draw", path, "-o", str(tmp_path / "a.png")]) == 1
    assert "pip install 'hvdlite[plot]'" in capsys.readouterr().err


@pytest.mark.thorough
def test_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    path = write(tmp_path / "a.json", 0)
    assert main(["draw", path, "-o", str(tmp_path / "a.png"), "--title", "one step"]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert main(["draw", path, "-o", str(tmp_path / "b.png"), "--start-ms", "1000"]) == 1
    error = capsys.readouterr().err
    assert "nothing happened in this part of the timeline, which covers 0.01 to 0.03 ms" in error
    assert main(["draw", path, "-o", str(tmp_path / "a.xyz")]) == 1
    assert capsys.readouterr().err.endswith("a.xyz: a picture is named .png, .svg or .pdf\n")


def test_a_merge_writes_the_file_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "target.json").touch()
    (tmp_path / "merged.json").symlink_to("target.json")
    merge(tmp_path, write(tmp_path / "a.json", 0))
    assert (tmp_path / "merged.json").is_symlink() and (tmp_path / "target.json").stat().st_size


def svg_of(tmp_path: Path, events: list[Event], *words: str) -> str:
    """A picture, as text in which every label stands."""
    path = tmp_path / "zoomed.json"
    path.write_text(json.dumps(events))
    output = tmp_path / "zoomed.svg"
    assert main(["draw", str(path), "-o", str(output), *words]) == 0
    return output.read_text()


def test_the_axis_of_a_picture_has_the_times_that_select_a_part(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    events = json.loads(Path(write(tmp_path / "a.json", 0)).read_text())
    later = [{**e, "ts": e["ts"] * 50_000 + 3_600_000_000} if "ts" in e else e for e in events]
    window = ("--start-ms", "3601000", "--end-ms", "3601400")  # within ALLREDUCE
    labels = re.findall(r"<!-- ([\d.]+) -->", svg_of(tmp_path, later, *window))
    assert labels[0] == "3601000" and labels[-1] == "3601400"


@pytest.mark.thorough
def test_a_phase_has_one_colour_in_all_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    head = json.loads(Path(write(tmp_path / "a.json", 0)).read_text())[:6]

    def colours(*phases: str) -> list[str]:
        """The colours of these phases, each in a collective, in the order of the legend."""
        events = list(head)
        for k, phase in enumerate(phases):
            events.append({"ph": "B", "name": "ALLREDUCE", "ts": 100 * k, "pid": 2})
            events.append({"ph": "B", "name": phase, "ts": 100 * k + 10, "pid": 2})
            events += ({"ph": "E", "ts": 100 * k + after, "pid": 2} for after in (50, 60))
        legend = svg_of(tmp_path, events).partition('id="legend_1"')[2]
        drawn = re.findall(r'id="patch_\d+">\s*<path [^>]*style="fill: (#\w+)', legend)
        assert len(drawn) == 1 + len(phases)
        return drawn[1:]  # The first is the collective's.

    for phase in ("SHM_ALLREDUCE", "SOME_PHASE"):
        alone = colours(phase)
        after_others = colours("MEMCPY_IN_FUSION_BUFFER", "RING_ALLREDUCE", phase)
        assert alone == after_others[-1:] and len({*after_others}) == 3
