"""What a cluster records: pushes, pulls and updates in a timeline and a table, and how stale."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from hvdlite.common.base.metrics import METRICS
from hvdlite.common.timeline.recorder import Timeline
from hvdlite.ps.connections.messages import Answer, Message
from hvdlite.ps.connections.records import Records, path_of_process
from hvdlite.ps.tables.clocks import ASYNC, SSP, SYNC, Mode
from hvdlite.ps.tables.table import Table
from hvdlite.tools.timeline_reader import check
from tests.ps.cluster import SIZES, NewCluster, trainers
from tests.ps.test_tables import begun, payloads, values_of


def push(table: Table, worker: int, clock: int) -> Answer:
    data = payloads(values_of(clock, worker))
    return table.push(b"%d" % worker, worker, Message("push", clock=clock, payloads=data))[0]


def pull(table: Table, worker: int, clock: int) -> list[Answer]:
    return table.pull(b"%d" % worker, worker, Message("pull", clock=clock))


def test_a_push_is_as_stale_as_there_were_updates_since_its_pull() -> None:
    table = begun(Mode(ASYNC))
    pull(table, 0, 0)
    for clock in range(3):
        pull(table, 1, clock)
        assert push(table, 1, clock).message.body["stale"] == 0
    assert push(table, 0, 0).message.body["stale"] == 3
    pull(table, 0, 1)
    assert push(table, 0, 1).message.body["stale"] == 0


def test_a_pull_is_as_stale_as_the_slowest_worker_is_behind() -> None:
    table = begun(Mode(SSP, 2))
    for clock in range(2):
        push(table, 1, clock)
        (answer,) = pull(table, 1, clock + 1)
        assert answer.message.body["stale"] == clock + 1
    push(table, 0, 0)
    (answer,) = pull(table, 0, 1)
    assert answer.message.body["stale"] == 0


def test_nothing_is_stale_in_sync() -> None:
    table = begun(Mode(SYNC))
    for clock in range(3):
        for worker in range(2):
            assert push(table, worker, clock).message.body["stale"] == 0
        for worker in range(2):
            (answer,) = pull(table, worker, clock + 1)
            assert answer.message.body["stale"] == 0


def test_a_worker_counts_for_the_live_view(new_cluster: NewCluster) -> None:
    first, second = trainers(new_cluster(servers=1, workers=2), 2, ASYNC)
    counts = first.worker._client.records.counts
    assert counts() == {"server_requests": 0, "staleness": 0}
    second.train(3)
    first.train(2)
    found = counts()
    assert found["server_requests"] == 0 and found["staleness"] == 0
    for kind in ("push", "pull"):
        assert found[f"collective_calls_total.{kind}"] == 2
        assert found[f"collective_bytes_total.{kind}"] == 2 * 8 * sum(SIZES)
        assert 0 < found[f"collective_seconds_total.{kind}"] < 60
    second.train(6)
    first.push()
    first.table.pull(first.values)
    assert counts()["staleness"] == 3
    assert {name.partition(".")[0] for name in found} <= {*METRICS}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def spans(path: Path, track: str) -> list[tuple[Any, ...]]:
    events = json.loads(path.read_text())
    (pid,) = (e["pid"] for e in events if e["ph"] == "M" and e["args"].get("name") == track)
    return [
        (e["ph"], e.get("name"), e.get("args"))
        for e in events
        if e["pid"] == pid and e["ph"] in "BE"
    ]


def test_a_server_writes_what_it_was_given_and_gave(tmp_path: Path) -> None:
    timeline = Timeline.open(str(tmp_path / "t.json"), 0)
    table = begun(Mode(ASYNC))
    rows = tmp_path / "t.csv"
    table.records = Records(timeline, rows.open("w", newline="", buffering=1))
    pull(table, 0, 0)
    push(table, 1, 0)
    push(table, 1, 0)  # Sent again: it is no push.
    push(table, 0, 0)
    table.records.close()
    timeline.close()
    bytes_ = sum(map(len, payloads(values_of(0, 0))))
    found = [(r["kind"], r["peer"], r["clock"], r["stale"], r["bytes"]) for r in rows_of(rows)]
    assert found == [
        ("pull", "worker 0", "0", "0", str(bytes_)),
        ("update", "", "", "", "0"),
        ("push", "worker 1", "0", "0", str(bytes_)),
        ("update", "", "", "", "0"),
        ("push", "worker 0", "0", "1", str(bytes_)),
    ]
    assert all(float(row["start"]) <= float(row["end"]) for row in rows_of(rows))
    about = {"clock": 0, "version": 2, "stale": 1, "bytes": bytes_}
    path = tmp_path / "t.json"
    assert spans(path, "[push] t, worker 0") == [("B", "PUSH", None), ("E", None, about)]
    assert [each[:2] for each in spans(path, "[update] t")] == [("B", "UPDATE"), ("E", None)] * 2
    assert not check(json.loads(path.read_text())).problems


def test_a_request_that_fails_is_ended_by_the_next_one(tmp_path: Path) -> None:
    rows = tmp_path / "t.csv"
    records = Records(rows=rows.open("w", newline="", buffering=1))
    records.begin("pull", "t", "server 0")
    records.begin("pull", "t", "server 0")
    records.end("pull", "t", "server 0", version=1)
    records.end("pull", "t", "server 0", version=1)
    records.close()
    assert len(rows_of(rows)) == 1
    records.end("pull", "t", "server 0", version=1)
    assert not Records().enabled


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    trace = "HVDLITE_TRACE_ITERATIONS"
    for word, what in (("HVDLITE_TIMELINE", "the timeline"), (trace, trace)):
        why = rf"\[Errno 2\] server 3 cannot write {what}: No such file.*server3"
        with pytest.raises(FileNotFoundError, match=why):
            Records.by_settings({word: str(tmp_path / "none" / "a.csv")}, "server", 3)
    assert path_of_process("/a/b.json", "server", 3) == "/a/b.server3.json"
