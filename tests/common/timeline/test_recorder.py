"""The timeline: what is in its file, and that the file is valid JSON whatever happens."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hvdlite.numpy as hvd
from hvdlite.common.runtime.recording import Recording
from hvdlite.common.settings.config import Config
from hvdlite.common.timeline import chrome_trace as trace_module
from hvdlite.common.timeline import recorder as timeline_module
from hvdlite.common.timeline.recorder import Timeline, path_of_rank
from hvdlite.tools.timeline_reader import check, read_events
from tests.limits import HANG_SECONDS
from tests.ranks import run_ranks

Event = dict[str, Any]


def load(path: Path) -> list[Event]:
    events: list[Event] = json.loads(path.read_text())
    return events


def track(events: list[Event], name: str) -> list[Event]:
    """The events of the track `name`, without its metadata; the names of B stand in E too."""
    pids = [e["pid"] for e in events if e["ph"] == "M" and e["args"].get("name") == name]
    assert len(pids) == 1, f"{name} has the tracks {pids}"
    return [e for e in events if e.get("pid") == pids[0] and e["ph"] != "M"]


def shape_of(events: list[Event]) -> list[tuple[str, str | None]]:
    return [(e["ph"], e.get("name")) for e in events]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "timeline.json"


@pytest.fixture
def timeline(path: Path) -> Iterator[Timeline]:
    opened = Timeline.open(str(path), rank=0)
    yield opened
    opened.close()


def allreduce(timeline: Timeline, tensor: str) -> None:
    timeline.negotiate_start(tensor, "allreduce")
    for rank in range(2):
        timeline.rank_ready(tensor, rank)
    timeline.negotiate_end(tensor)
    timeline.start(tensor, "allreduce")
    with timeline.activity([tensor], "SHM_ALLREDUCE"):
        pass
    timeline.end(tensor, "float32", (2, 3))


def test_what_a_device_has_run_before_the_file_began_is_left_out(path: Path) -> None:
    timeline = Timeline.open(str(path), rank=0)
    began = time.monotonic()
    timeline.device_span("cuda", "allreduce", ["before"], began - 5, began - 4)
    timeline.device_span("cuda", "allreduce", ["amid"], began - 5, began + 0.5)
    timeline.device_span("cuda", "allreduce", ["after"], began + 0.5, began + 2.5)
    timeline.close()
    amid, after = track(load(path), "[device cuda]")
    assert (amid["args"]["names"], amid["ts"]) == (["amid"], 0)
    assert abs(amid["ts"] + amid["dur"] - after["ts"]) <= 2
    assert after["args"]["names"] == ["after"] and abs(after["dur"] - 2_000_000) <= 2


def test_a_tensor_goes_through_horovods_states(timeline: Timeline, path: Path) -> None:
    allreduce(timeline, "allreduce.a")
    timeline.close()
    events = track(load(path), "allreduce.a")
    assert shape_of(events) == [
        ("B", "NEGOTIATE_ALLREDUCE"),
        ("X", "0"),
        ("X", "1"),
        ("E", None),
        ("B", "ALLREDUCE"),
        ("B", "SHM_ALLREDUCE"),
        ("E", None),
        ("E", None),
    ]
    assert events[-1]["args"] == {"dtype": "float32", "shape": "[2, 3]"}
    assert all(event["dur"] == 0 for event in events if event["ph"] == "X")
    times = [event["ts"] for event in events]
    assert times == sorted(times)


def test_the_head_says_when_and_who(path: Path) -> None:
    timeline = Timeline(3)
    timeline.set_clock_offset(1.5)
    timeline.record_to(str(path))
    timeline.set_clock_offset(-0.25)
    timeline.close()
    heads = [event for event in load(path) if event.get("pid") == 0]
    assert heads[0]["name"] == "process_name" and heads[0]["ph"] == "M"
    assert heads[0]["args"]["start_time_since_epoch_in_micros"] > 1e15
    assert heads[0]["args"]["rank"] == 3
    assert heads[0]["args"]["clock_offset_in_micros"] == 1_500_000
    assert heads[1] == {
        "name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}
    }  # fmt: skip
    assert heads[2]["args"]["clock_offset_in_micros"] == -250_000


def test_a_tensor_is_a_process_with_a_name_and_keeps_it(timeline: Timeline, path: Path) -> None:
    for tensor in ("a", 'quote " and \\ and ü', "a"):
        allreduce(timeline, tensor)
    timeline.close()
    events = load(path)
    names = {e["pid"]: e["args"]["name"] for e in events if "name" in e.get("args", {})}
    assert names == {1: "a", 2: 'quote " and \\ and ü'}
    assert len(track(events, "a")) == 16


def test_the_engine_and_its_segments_have_tracks(timeline: Timeline, path: Path) -> None:
    timeline.engine("WAIT")
    timeline.engine("EXECUTE")
    names = [f"t{i}" for i in range(100)]
    timeline.segment_start(names, 4096, "allreduce")
    timeline.segment_end()
    timeline.engine(None)
    timeline.close()
    events = load(path)
    assert shape_of(track(events, "[engine]")) == [
        ("B", "WAIT"), ("E", None), ("B", "EXECUTE"), ("E", None)
    ]  # fmt: skip
    segment = track(events, "[segments]")
    assert shape_of(segment) == [("B", "ALLREDUCE"), ("C", "bytes"), ("E", None), ("C", "bytes")]
    assert segment[0]["args"]["tensors"] == 100 and segment[0]["args"]["bytes"] == 4096
    assert segment[0]["args"]["names"] == names[:8]
    assert [e["args"]["bytes"] for e in segment if e["ph"] == "C"] == [4096, 0]


def test_cycles_are_marked_only_on_request(tmp_path: Path) -> None:
    timeline = Timeline(0)
    for name, marked in (("off.json", False), ("on.json", True)):
        timeline.record_to(str(tmp_path / name), mark_cycles=marked)
        timeline.mark_cycle()
    timeline.close()
    marks = {
        name: [e for e in load(tmp_path / name) if e.get("name") == "CYCLE_START"]
        for name in ("off.json", "on.json")
    }
    assert marks["off.json"] == []
    (mark,) = marks["on.json"]
    assert mark["ph"] == "i" and mark["s"] == "g"


def test_an_error_ends_what_was_open(timeline: Timeline, path: Path) -> None:
    timeline.negotiate_start("a", "broadcast")
    timeline.start("a", "error")
    timeline.end("a")
    timeline.close()
    assert shape_of(track(load(path), "a")) == [
        ("B", "NEGOTIATE_BROADCAST"), ("E", None), ("B", "ERROR"), ("E", None)
    ]  # fmt: skip


def test_an_activity_ends_when_its_block_raises(timeline: Timeline, path: Path) -> None:
    timeline.start("a", "allreduce")
    with pytest.raises(KeyError), timeline.activity(["a"], "MPI_ALLREDUCE"):
        raise KeyError
    timeline.start("a", "allgather")
    timeline.close()
    assert check(load(path)).problems == []
    assert shape_of(track(load(path), "a"))[:3] == [
        ("B", "ALLREDUCE"), ("B", "MPI_ALLREDUCE"), ("E", None)
    ]  # fmt: skip


def test_the_end_of_an_activity_leaves_the_collective_open(timeline: Timeline, path: Path) -> None:
    timeline.start("a", "allreduce")
    timeline.activity_end(["a"])  # its start was before the recording
    timeline.end("a", "float32", (1,))
    timeline.close()
    assert shape_of(track(load(path), "a")) == [("B", "ALLREDUCE"), ("E", None)]
    assert check(load(path)).collectives == 1


def test_the_file_is_complete_after_every_flush(timeline: Timeline, path: Path) -> None:
    seen = 0
    for number in range(20):
        allreduce(timeline, f"t{number}")
        timeline.flush()
        events = load(path)
        assert len(events) > seen and check(events).problems == []
        seen = len(events)


def test_the_writer_needs_no_flush(timeline: Timeline, path: Path) -> None:
    allreduce(timeline, "a")
    while True:  # the time limit of the test ends it
        try:
            if check(load(path)).collectives == 1:
                break
        except json.JSONDecodeError:  # it was written to while it was read
            continue


def test_a_timeline_that_is_off_does_nothing(tmp_path: Path) -> None:
    timeline = Timeline(0)
    assert not timeline.enabled
    allreduce(timeline, "a")
    timeline.engine("WAIT")
    timeline.segment_start(["a"], 1, "allreduce")
    timeline.segment_end()
    timeline.mark_cycle()
    timeline.flush()
    timeline.close()
    assert list(tmp_path.iterdir()) == []


def test_a_switch_of_files_loses_nothing(tmp_path: Path) -> None:
    timeline = Timeline.open(str(tmp_path / "1.json"), 0)
    allreduce(timeline, "a")
    timeline.record_to(str(tmp_path / "2.json"))
    allreduce(timeline, "b")
    timeline.close()
    allreduce(timeline, "c")
    timeline.record_to(str(tmp_path / "3.json"))
    allreduce(timeline, "d")
    timeline.close()
    for name, tensor in (("1.json", "a"), ("2.json", "b"), ("3.json", "d")):
        events = load(tmp_path / name)
        assert check(events).collectives == 1
        assert len(track(events, tensor)) == 8


def test_the_same_path_again_goes_on(timeline: Timeline, path: Path) -> None:
    allreduce(timeline, "a")
    timeline.record_to(str(path), mark_cycles=True)
    timeline.mark_cycle()
    timeline.close()
    events = load(path)
    assert check(events).collectives == 1
    assert any(event.get("name") == "CYCLE_START" for event in events)


def test_an_unwritable_path_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "no" / "t.json", tmp_path, file / "t.json", tmp_path / "pipe"):
        with pytest.raises(OSError, match="rank 3 cannot write the timeline") as caught:
            Timeline.open(str(path), 3)
        assert str(path) in str(caught.value)


def test_a_refused_switch_leaves_the_old_file_running(timeline: Timeline, path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        timeline.record_to(str(path.parent / "no" / "t.json"))
    allreduce(timeline, "a")
    timeline.close()
    assert check(load(path)).collectives == 1


def test_a_full_disk_leaves_a_valid_file_and_a_warning(
    timeline: Timeline,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    allreduce(timeline, "a")
    timeline.flush()
    write = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: write(fd, data[:7] if len(data) > 7 else data, at)
    )
    allreduce(timeline, "b")
    timeline.flush()
    monkeypatch.undo()
    assert not timeline.enabled
    assert "No space left" in caplog.text and str(path) in caplog.text
    events = load(path)
    assert check(events).collectives == 1 and check(events).problems == []
    timeline.record_to(str(path))  # when there is room again
    timeline.close()
    assert check(load(path)).problems == []


def test_events_beyond_the_bound_are_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "FLUSH_SECONDS", 60)  # the writer stays away
    timeline = Timeline(0, queue_events=10)
    timeline.record_to(str(path))
    for _ in range(4):
        allreduce(timeline, "a")  # 8 events each
    timeline.flush()
    allreduce(timeline, "b")
    timeline.close()
    events = load(path)
    report = check(events)
    assert report.problems == [] and report.open_spans == 0
    assert report.dropped == 4 * 8 - 10
    drop = [e.get("name") for e in events].index("EVENTS_DROPPED")
    assert check(events[:drop]).open_spans == 0  # what it was is unknown from here on
    assert all(event["ts"] <= events[drop]["ts"] for event in events[:drop] if "ts" in event)
    assert len(track(events, "b")) == 8


def test_names_that_never_come_back_are_forgotten(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "TRACKS", 4)
    trace = trace_module.TraceWriter(str(path), 0, 0.0, "rank 0")
    for number in range(50):
        trace.negotiate_start(number, f"allreduce.noname.{number}", "allreduce")
    assert len(trace._tracks) == 4
    trace.finish(50)
    trace.file.close()
    events = load(path)
    assert check(events).problems == [] and check(events).open_spans == 0
    assert check(events).tracks == 50


def test_threads_record_at_the_same_time(timeline: Timeline, path: Path) -> None:
    def record(name: str) -> None:
        for _ in range(300):
            allreduce(timeline, name)

    threads = [threading.Thread(target=record, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    report = check(load(path))
    assert report.collectives == 1200 and report.problems == []


def _record_in_child(timeline: Timeline) -> None:
    assert not timeline.enabled
    allreduce(timeline, "child")
    timeline.close()


def test_a_forked_child_leaves_the_file_alone(timeline: Timeline, path: Path) -> None:
    allreduce(timeline, "parent")
    child = multiprocessing.get_context("fork").Process(target=_record_in_child, args=(timeline,))
    child.start()
    child.join()
    assert child.exitcode == 0
    allreduce(timeline, "parent")
    timeline.close()
    events = load(path)
    assert check(events).collectives == 2
    assert "child" not in {event.get("args", {}).get("name") for event in events}


# Ctrl-C stops the main thread anywhere; the writer's thread, which it does not, writes the file.
WRITE_FOREVER = """
import sys, threading
from hvdlite.common.timeline.recorder import Timeline
timeline = Timeline.open(sys.argv[1], 0)
number = 0
while True:
    timeline.negotiate_start(f"t{number % 50}", "allreduce")
    timeline.rank_ready(f"t{number % 50}", 0)
    timeline.start(f"t{number % 50}", "allreduce")
    timeline.end(f"t{number % 50}", "float32", (number,))
    number += 1
    if number % 100 == 0:
        writing = threading.Thread(target=timeline.flush)
        writing.start()
        writing.join()
        print("written", flush=True)
"""


@pytest.mark.parametrize(
    ("how", "lines"),
    [(signal.SIGKILL, 1), (signal.SIGKILL, 40), (signal.SIGTERM, 7), (signal.SIGINT, 7)],
)
def test_a_process_that_is_killed_leaves_what_it_has_written(
    path: Path, how: signal.Signals, lines: int
) -> None:
    """The kernel ends a large write between two pages where the process has been killed."""
    command = [sys.executable, "-c", WRITE_FOREVER, str(path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    for _ in range(lines):
        assert child.stdout.readline()
    child.send_signal(how)
    child.stdout.close()
    assert child.wait(30) != 0
    whole = path.read_bytes().endswith(trace_module.TraceFile.TAIL)
    report = check(load(path) if whole else read_events(str(path)))
    assert report.problems == [] and report.collectives >= 100 * lines


def test_a_script_that_forgets_to_close_loses_nothing(path: Path) -> None:
    script = (
        "import sys\n"
        "from hvdlite.common.timeline.recorder import Timeline\n"
        "timeline = Timeline.open(sys.argv[1], 0)\n"
        "timeline.start('a', 'allreduce'); timeline.end('a', 'int8', ())\n"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=HANG_SECONDS)
    assert check(load(path)).collectives == 1


def test_the_path_of_a_rank() -> None:
    assert path_of_rank("a/b.json", 3) == "a/b.rank3.json"
    assert path_of_rank("b", 0) == "b.rank0"
    assert path_of_rank("a.b/c.tar.json", 12) == "a.b/c.tar.rank12.json"


def test_a_folder_without_a_name_is_refused_as_any_folder() -> None:
    for config in (Config(timeline="."), Config(timeline="/", timeline_all_ranks=True)):
        with pytest.raises(IsADirectoryError, match="rank 0 cannot write the timeline: Is a"):
            Recording(config, 0).begin()


def test_a_job_records_who_was_ready_and_what_was_done(tmp_path: Path) -> None:
    settings = Config(timeline=str(tmp_path / "t.json"), timeline_all_ranks=True)

    def main(rank: int) -> None:
        odd = hvd.add_process_set([1])
        for _ in range(3):  # asked for in full, then by the bit of the response cache
            hvd.allreduce(np.ones(3, np.float32), name="a")
            if rank == 1:
                hvd.allreduce(np.ones(5), name="b", process_set=odd)
        hvd.barrier()

    run_ranks(2, main, config=settings)
    zero = load(tmp_path / "t.rank0.json")
    one = load(tmp_path / "t.rank1.json")
    assert check(zero).problems == check(one).problems == []
    events = track(zero, "allreduce.a")
    ticks = [event["name"] for event in events if event["ph"] == "X"]
    assert [sorted(ticks[step : step + 2]) for step in (0, 2, 4)] == [["0", "1"]] * 3
    outputs = [event["args"] for event in events if event["ph"] == "E" and "args" in event]
    assert outputs == [{"dtype": "float32", "shape": "[3]"}] * 3
    assert len(track(one, "allreduce.b")) > 0
    names = {event["args"].get("name") for event in zero if event["ph"] == "M"}
    assert "allreduce.b" not in names  # rank 0 has no part in it


NAMES = st.sampled_from(["a", "b", "[engine]", '"'])
CALLS = st.one_of(
    st.tuples(st.just("negotiate_start"), NAMES, st.sampled_from(["allreduce", "broadcast"])),
    st.tuples(st.just("rank_ready"), NAMES, st.integers(0, 3)),
    st.tuples(st.just("negotiate_end"), NAMES),
    st.tuples(st.just("start"), NAMES, st.sampled_from(["allreduce", "error"])),
    st.tuples(st.just("activity_start"), st.lists(NAMES), st.sampled_from(["QUEUE", "X"])),
    st.tuples(st.just("activity_end"), st.lists(NAMES)),
    st.tuples(st.just("end"), NAMES, st.none() | st.text(), st.none() | st.lists(st.integers())),
    st.tuples(st.just("engine"), st.none() | st.text()),
    st.tuples(st.just("segment_start"), st.lists(st.text()), st.integers(), NAMES),
    st.tuples(st.just("segment_end")),
    st.tuples(st.just("mark_cycle")),
    st.tuples(st.just("flush")),
)


@settings(max_examples=60)
@given(calls=st.lists(CALLS, max_size=40))
def test_any_sequence_of_calls_gives_a_well_formed_file(
    calls: list[tuple[Any, ...]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("random") / "t.json"
    timeline = Timeline.open(str(path), 0, mark_cycles=True)
    for name, *args in calls:
        getattr(timeline, name)(*args)
    timeline.close()
    report = check(load(path))
    assert report.problems == [] and report.open_spans == 0


def test_a_close_in_the_middle_of_a_flush_ends_the_writer(timeline: Timeline) -> None:
    """The writer clears its wake-up just after `close` has set it."""
    wake, stopping, writer = timeline._wake, timeline._stopping, timeline._writer
    clear = wake.clear

    def close_and_clear() -> None:
        stopping.set()
        wake.set()
        clear()

    wake.clear = close_and_clear  # type: ignore[method-assign]
    timeline.negotiate_start("a", "allreduce")
    assert writer is not None
    writer.join(20)
    assert not writer.is_alive()
