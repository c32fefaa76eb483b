"""What a scheduler writes down: before anybody hears of it, and no more than is new."""

from __future__ import annotations

import errno
import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from hvdlite.numpy import ps
from hvdlite.ps import context
from hvdlite.ps.cluster.settings import ClusterSettings
from hvdlite.ps.connections import system
from hvdlite.ps.connections.channel import Listener
from hvdlite.ps.connections.client import name_of
from hvdlite.ps.connections.messages import SCHEDULER, SERVER, WORKER, Message
from hvdlite.ps.layouts.blocks import TensorSpec
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.scheduler.scheduler import Scheduler
from hvdlite.ps.scheduler.state_file import StateFile
from hvdlite.ps.tables.clocks import ASYNC
from hvdlite.ps.tables.updater import Added
from tests.ps.cluster import SIZES, SPECS, NewCluster

OPTIONS = TableOptions(ASYNC)


class Written:
    """Counts what goes to the file of the scheduler."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wholes, self.appends, self.nbytes = 0, 0, 0
        whole, append = system.write_whole, system.append

        def count_whole(path: Path, pieces: Any) -> int:
            size = whole(path, pieces)
            if path.name == "scheduler.json":
                self.wholes += 1
                self.nbytes += size
            return size

        def count_append(path: Path, data: bytes) -> None:
            append(path, data)
            self.appends += 1
            self.nbytes += len(data)

        monkeypatch.setattr(system, "write_whole", count_whole)
        monkeypatch.setattr(system, "append", count_append)


class Desk:
    """Stands in for a listener: each time, a scheduler finds all that was asked before."""

    def __init__(self, file: Path) -> None:
        self.asked: deque[tuple[bytes, Message]] = deque()
        self.said: list[tuple[bytes, Message]] = []
        self.known_then: list[bool] = []  # Whether the file had a table when that was answered.
        self._file = file

    awake_seconds = staticmethod(time.monotonic)

    def receive(self, seconds: float) -> tuple[bytes, Message] | None:
        return self.asked.popleft() if self.asked else None

    def send(self, peer: bytes, message: Message) -> None:
        self.said.append((peer, message))
        if message.kind == "layout":
            self.known_then.append(f'"{message.table}"' in self._file.read_text())

    def enter(self, scheduler: Scheduler, workers: int) -> list[bytes]:
        """Let a server and workers come; return the names of the workers."""
        names = [name_of(SERVER, "0"), *(name_of(WORKER, str(n)) for n in range(workers))]
        for number, name in enumerate(names):
            role = WORKER if number else SERVER
            body = {
                "role": role, "number": max(0, number - 1), "address": "127.0.0.1:1",
                "node_id": str(number), "num_servers": 1, "num_workers": workers, "joins": False,
            }  # fmt: skip
            self.asked.append((name, Message("hello", 1, body=body)))
        self.run(scheduler)
        return names[1:]

    def run(self, scheduler: Scheduler) -> None:
        """Let a scheduler answer all that was asked."""
        scheduler.serve(lambda: not self.asked)


def scheduler_at(desk: Desk, file: Path, workers: int) -> Scheduler:
    settings = ClusterSettings(SCHEDULER, "", 1, workers, independent=True)
    return Scheduler(cast(Listener, desk), settings, file)


def tables_in(scheduler: Scheduler) -> str:
    """Return all that a scheduler knows of tables, but which of them are new."""
    return json.dumps({**scheduler.registry.state(), "reached": {}})


def declaration(name: str, request: int) -> Message:
    spec = TensorSpec(name, "float32", (1024,))
    return Message("declare", request, name, body={"specs": [spec], "options": [*OPTIONS]})


def test_a_table_costs_what_it_is_and_not_what_all_are(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = new_cluster(1, 1)
    worker = cluster.worker("worker 0", 0)
    written = Written(monkeypatch)
    for number in range(100):
        values = [np.zeros(size) for size in SIZES]
        worker.declare(str(number), SPECS, OPTIONS, lambda values=values: values)
    assert written.wholes <= 3
    assert written.nbytes <= 3 * (cluster.folder / "scheduler.json").stat().st_size


def test_many_tensors_that_are_started_at_once_are_written_together(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = new_cluster(2, 1, updater=Added).worker("worker 0", 0)
    monkeypatch.setattr(context, "worker", lambda: worker)
    monkeypatch.setattr(context, "role", lambda: "worker")
    ps.start("one", np.ones(3))
    written = Written(monkeypatch)
    ps.start({"one": np.zeros(3), **{str(n): np.full(5, float(n)) for n in range(100)}})
    assert written.appends <= 50  # The machine decides how many come together.
    assert ps.pull("one").tolist() == [1.0] * 3
    for number in (0, 7, 99):
        ps.push(str(number), np.ones(5))
        assert ps.pull(str(number)).tolist() == [number + 1.0] * 5
    with pytest.raises(ValueError, match="datetime64"):
        ps.start({"dates": np.zeros(3, "datetime64[s]")})
    for words in (["nothing"], [{"one": np.ones(3)}, "sync"]):
        with pytest.raises(TypeError, match="a name and an array, or a mapping"):
            ps.start(*words)


def test_no_turn_that_lacks_something_ends_the_scheduler(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "scheduler.json")
    scheduler = scheduler_at(desk, tmp_path / "scheduler.json", 1)
    (worker,) = desk.enter(scheduler, 1)
    beat = {"tables": {}, "layout": 1, "load": "the last one"}
    asked = [Message("turn", 2, body={"what": "load"}), Message("beat", 3, body=beat)]
    asked.append(Message("turn", 4, body={"what": "save", "number": 1, "late": False}))
    desk.asked += [(worker, message) for message in asked]
    desk.run(scheduler)
    over = {"turn": scheduler.turns.turn, "load": {}}
    desk.asked += [(worker, Message("over", 5, body=over)), (worker, declaration("t", 6))]
    desk.run(scheduler)
    said = {message.request: message.kind for _, message in desk.said}
    assert said == {**said, 2: "failed", 3: "failed", 4: "turn", 5: "failed", 6: "layout"}


def test_declarations_that_wait_together_are_written_together_before_they_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "scheduler.json"
    desk = Desk(file)
    scheduler = scheduler_at(desk, file, 4)
    workers = desk.enter(scheduler, 4)
    written = Written(monkeypatch)
    for number in range(50):
        desk.asked += [(worker, declaration(f"t{number}", 2 + number)) for worker in workers]
    desk.run(scheduler)
    assert len(desk.known_then) == 200 and all(desk.known_then)
    assert (written.wholes, written.appends) == (0, 1)
    desk.asked += [(worker, declaration("t7", 99)) for worker in workers]
    desk.run(scheduler)
    assert len(desk.known_then) == 204 and written.appends == 1  # It was known before.
    again = scheduler_at(desk, file, 4)
    assert tables_in(again) == tables_in(scheduler)


@pytest.mark.parametrize("taken", [0, 20])
def test_a_declaration_that_a_full_disk_does_not_take_is_answered_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """The disk may take a part of the line, behind which nothing may be added any more."""
    file = tmp_path / "scheduler.json"
    desk = Desk(file)
    scheduler = scheduler_at(desk, file, 1)
    (worker,) = desk.enter(scheduler, 1)
    replace = system.replace

    def fill(path: Path, data: bytes) -> None:
        with open(path, "ab") as half:
            half.write(data[:taken])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(source: Any, target: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(system, "append", fill)
        full.setattr(system, "replace", refuse)
        desk.asked.append((worker, declaration("a", 2)))
        desk.run(scheduler)
        assert desk.known_then == []
        assert scheduler_at(desk, file, 1).registry.modes() == {}
    assert system.replace is replace
    for request, name in [(3, "a"), (4, "b")]:
        desk.asked.append((worker, declaration(name, request)))
        desk.run(scheduler)
    assert desk.known_then == [True, True]
    assert [*scheduler_at(desk, file, 1).registry.modes()] == ["a", "b"]


@pytest.mark.parametrize("half", ['["b', '["b"]\x00', ""])
def test_a_line_of_which_a_half_is_there_is_nothing(tmp_path: Path, half: str) -> None:
    file = tmp_path / "scheduler.json"
    before = StateFile(file, lambda: {"all": []})
    before.write()
    before.add(["a"])
    with open(file, "a") as torn:
        torn.write(half)
    after = StateFile(file, lambda: {"all": ["a"]})
    found = after.read()
    assert found == ({"all": []}, ["a"])
    after.add(["c"])  # Not behind the half of a line: all is written.
    found = StateFile(file, dict).read()
    assert found == ({"all": ["a"]}, [])
