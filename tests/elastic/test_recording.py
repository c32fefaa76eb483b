"""The timeline from world to world: one file, closed rows, marks, and nothing overwritten."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdlite.common.iterations.rows import read_rows
from tests.elastic.fake_driver import STOP
from tests.elastic.test_worlds import MODULE, in_world, stop
from tests.elastic.workers import Workers, job

pytestmark = pytest.mark.timeout(120)

Event = dict[str, Any]


def events_of(path: Path) -> list[Event]:
    """The events of a file, which is complete JSON after each write."""
    events: list[Event] = json.loads(path.read_text())
    return events


def named(events: list[Event]) -> Iterator[Event]:
    return (event for event in events if "name" in event)


def check_rows(events: list[Event]) -> None:
    """Every row that was open ends before a RESET; times never go back."""
    depth: dict[int, int] = {}
    last = 0
    for event in events:
        assert event.get("ts", last) >= last
        last = event.get("ts", last)
        if event["ph"] in "BE":
            depth[event["pid"]] = depth.get(event["pid"], 0) + (1 if event["ph"] == "B" else -1)
            assert depth[event["pid"]] >= 0
        if event.get("name") == "RESET":
            assert not any(depth.values())


def wait_for_reset(path: Path, epoch: int) -> None:
    """Wait until the file has the mark of a world, and an allreduce after it."""
    end = time.monotonic() + 20
    names: list[Any] = []
    while True:
        with contextlib.suppress(json.JSONDecodeError):  # A write was seen in part.
            names = [event.get("name") for event in events_of(path)]
        marks = [at for at, name in enumerate(names) if name == "RESET"]
        if marks and len(marks) == epoch - 1 and "ALLREDUCE" in names[marks[-1] :]:
            return
        assert time.monotonic() < end


def lose(workers: Workers, victim: int, epoch: int) -> None:
    """Kill a worker in the world `epoch`, and wait until the next world trains."""
    workers.kill(victim)
    workers.processes.pop(victim).wait()
    for number in workers.processes:
        workers.wait_for(number, in_world(epoch + 1, step=10))


def test_one_file_goes_on_and_another_rank_0_begins_its_own(tmp_path: Path) -> None:
    path = tmp_path / "line.json"
    with job(tmp_path, 4, MODULE, HVDLITE_TIMELINE=str(path)) as workers:
        workers.driver.size = 1
        for number in range(4):
            workers.wait_for(number, in_world(1, step=10))
        for victim, epoch in ((3, 1), (2, 2)):
            lose(workers, victim, epoch)
            wait_for_reset(path, epoch + 1)
        lose(workers, 0, 3)
        events = events_of(path)
        check_rows(events)
        assert [e["args"] for e in named(events) if e["name"] == "RESET"] == [
            {"world": 2, "old_rank": 0, "old_size": 4, "rank": 0, "size": 3},
            {"world": 3, "old_rank": 0, "old_size": 3, "rank": 0, "size": 2},
        ]
        allreduces = [event for event in named(events) if event["name"] == "ALLREDUCE"]
        marks = [event["ts"] for event in named(events) if event["name"] == "RESET"]
        assert any(event["ts"] > marks[-1] for event in allreduces)
        before = path.read_bytes()
        stop(workers)
    assert path.read_bytes() == before
    events = events_of(tmp_path / "line.world4.json")
    check_rows(events)
    assert any(event["name"] == "ALLREDUCE" for event in named(events))


def test_every_rank_keeps_its_file(tmp_path: Path) -> None:
    variables = {"HVDLITE_TIMELINE": str(tmp_path / "line.json"), "HVDLITE_TIMELINE_ALL_RANKS": "1"}
    with job(tmp_path, 3, MODULE, **variables) as workers:
        driver = workers.driver
        driver.size, driver.admits = 1, False
        for number in range(3):
            workers.wait_for(number, in_world(1, step=10))
        lose(workers, 1, 1)
        workers.start(3, MODULE, **variables)
        driver.wait_for(lambda: 3 in driver.commits)
        driver.notice(2)
        for number in (0, 2, 3):
            workers.wait_for(number, in_world(3, step=10))
        stop(workers)
    files = {path.name: events_of(path) for path in tmp_path.glob("line*")}
    assert {*files} == {"line.rank0.json", "line.rank1.json", "line.rank2.json",
                        "line.world3.rank2.json"}  # fmt: skip
    places = [e["args"] for e in named(files["line.rank2.json"]) if e["name"] == "RESET"]
    assert [(e["old_rank"], e["old_size"], e["rank"], e["size"]) for e in places] == [
        (2, 3, 1, 2), (1, 2, 1, 3)
    ]  # fmt: skip
    for events in files.values():
        check_rows(events)


def test_the_trace_of_every_worker_goes_on_in_its_file(tmp_path: Path) -> None:
    variables = {"HVDLITE_TRACE_ITERATIONS": str(tmp_path / "trace.csv")}
    with job(tmp_path, 3, "worker_traced", **variables) as workers:
        driver = workers.driver
        driver.size, driver.admits = 1, False
        for number in range(3):
            workers.wait_for(number, in_world(1, step=10))
        lose(workers, 0, 1)
        workers.start(3, "worker_traced", **variables)
        driver.wait_for(lambda: 3 in driver.commits)
        driver.notice(2)
        for number in (1, 2, 3):
            workers.wait_for(number, in_world(3, step=10))
        driver.notice(STOP)
        assert {number: code for number, code in workers.codes().items() if code} == {}
        for number, name in ((1, "rank1"), (2, "rank2"), (3, "world3.rank2")):
            rows = read_rows(str(tmp_path / f"trace.{name}.csv"))
            worlds = [line for line in workers.lines(number) if "iterations" in line]
            ranks = [line["rank"] for line in worlds for _ in range(line["iterations"])]
            assert [row.rank for row in rows] == ranks
            assert [row.iteration for row in rows] == list(range(len(rows)))
            assert all(row.segments for row in rows)
