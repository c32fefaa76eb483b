"""What a server answers first, and what is on disk before anybody hears of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from hvdlite.ps.connections.channel import Listener
from hvdlite.ps.connections.messages import Message
from hvdlite.ps.layouts.blocks import TensorSpec, blocks_of
from hvdlite.ps.layouts.layout import place
from hvdlite.ps.server import saved_files
from hvdlite.ps.server.checkpoints import ServerCheckpoints
from hvdlite.ps.server.migration import Migration
from hvdlite.ps.server.server import Server
from hvdlite.ps.server.snapshots import SnapshotFolder
from hvdlite.ps.tables.clocks import ASYNC, SYNC, Mode
from hvdlite.ps.tables.description import TableDescription, describe_table
from hvdlite.ps.tables.table import TableLostError
from hvdlite.ps.tables.updater import Added, Updater
from tests.ps.test_tables import SPECS, Broken, Momentum, blocks, payloads, values_of

PEER = b"worker 0"


class Queue:
    """A listener with messages that wait."""

    memory = None

    def __init__(self) -> None:
        self.waiting: deque[Message] = deque()
        self.sent: list[Message] = []

    def receive(self, _seconds: float) -> tuple[bytes, Message] | None:
        return (PEER, self.waiting.popleft()) if self.waiting else None

    def send(self, _peer: bytes, message: Message) -> None:
        self.sent.append(message)


def started(server: Server, name: str, key: int) -> None:
    spec = TensorSpec(name, "float64", (2,))
    layout = place([2] * (key + 1), [8] * (key + 1), 1)
    described = describe_table(
        [spec], blocks_of([spec], key, layout, 0), Mode(ASYNC), average=False, first_key=key
    )
    body: dict[str, Any] = {"worker": 0, "table": described}
    for kind, words in (("start", body), ("offer", {})):
        payload = memoryview(np.zeros(2).tobytes())
        message = Message(kind, 1, name, 0, 1, words, [payload])
        answers = server.answer(PEER, message)
    assert [answer.message.kind for answer in answers] == ["started"]


def test_tables_that_were_declared_first_are_answered_first() -> None:
    queue = Queue()
    server = Server(cast("Listener", queue), lambda _: Added(), incarnation=1, workers=[0])
    for key, name in enumerate(["first", "second", "last"]):
        started(server, name, key)
    ones = memoryview(np.ones(2).tobytes())
    names = ["last", "second", "first"]  # As backward has their gradients.
    queue.waiting.extend(Message("pull", n, name, 0, 1) for n, name in enumerate(names, 1))
    queue.waiting.append(Message("push", 4, "first", 0, 1, {}, [ones]))
    queue.waiting.extend(Message("pull", n, name, 0, 1) for n, name in enumerate(names, 5))
    server.serve(lambda: not queue.waiting)

    assert [(each.kind, each.request) for each in queue.sent] == [
        ("pushed", 4), ("values", 3), ("values", 7), ("values", 2), ("values", 6), ("values", 1),
        ("values", 5),
    ]  # fmt: skip
    firsts = [np.frombuffer(each.payloads[0])[0] for each in queue.sent[1:3]]
    assert firsts == [0.0, 1.0]  # Each as it was when its pull came.


def test_none_waits_for_more_than_a_megabyte_of_others() -> None:
    queue = Queue()
    server = Server(cast("Listener", queue), lambda _: Added(), incarnation=1, workers=[0])
    started(server, "t", 0)
    queue.waiting.append(Message("pull", 1, "t", 0, 1))
    queue.waiting.extend(Message("push", 2, "t", 0, 1, {}, [bytes(16)]) for _ in range(100))
    server.serve(lambda: bool(queue.sent))
    assert ("values", 1) in [(each.kind, each.request) for each in queue.sent]
    assert 30 < len(queue.waiting) < 100


class Witness:
    """A listener that sends nothing, and notes what is on disk meanwhile."""

    memory = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sent: list[tuple[Message, int]] = []  # And the newest version on disk.

    def send(self, _peer: bytes, message: Message) -> None:
        found = self.folder.rglob("*.safetensors")
        self.sent.append((message, max((int(path.stem[-12:]) for path in found), default=-1)))


def half_pushed(
    folder: Path, new_updater: Callable[[], Updater] = Momentum
) -> tuple[Server, Witness]:
    """Return a server with a table of two workers, of which one has pushed, and pulls."""
    witness = Witness(folder)
    server = Server(
        cast("Listener", witness), lambda _: new_updater(), incarnation=1, workers=[0, 1],
        snapshots=SnapshotFolder(folder, 0), snapshot_every=1,
    )  # fmt: skip
    table = describe_table(SPECS, blocks(), Mode(SYNC), average=True)
    first = payloads(values_of(-1, 0))

    def tell(worker: int, kind: str, **words: Any) -> None:
        message = Message(kind, 1, "t", incarnation=1)._replace(**words)
        for peer, answer in server.answer(b"%d" % worker, message):
            witness.send(peer, answer)

    for worker in (0, 1):
        tell(worker, "start", body={"worker": worker, "table": table})
    tell(0, "offer", payloads=first)
    tell(0, "push", payloads=payloads(values_of(0, 0)))
    tell(0, "pull", clock=1)
    return server, witness


def goes(server: Server, witness: Witness) -> None:
    for peer, answer in server.answer(b"1", Message("leave", 9)):
        witness.send(peer, answer)


def is_lost(server: Server, _witness: Witness) -> None:
    server.set_workers([0])


@pytest.mark.parametrize("end", [goes, is_lost])
def test_a_step_that_the_end_of_a_worker_completes_is_on_disk_first(
    tmp_path: Path, end: Callable[[Server, Witness], None]
) -> None:
    server, witness = half_pushed(tmp_path)
    if end is is_lost:
        server._early.clear()
    end(server, witness)
    assert [(m.clock, saved) for m, saved in witness.sent if m.kind == "values"] == [(1, 1)]


class NoState(Momentum):
    """An optimizer whose state cannot be copied."""

    def state(self) -> Any:
        raise RuntimeError("it is on another device")


@pytest.mark.parametrize("end", [goes, is_lost])
def test_a_server_outlives_an_optimizer_that_fails_when_a_worker_ends(
    tmp_path: Path, end: Callable[[Server, Witness], None]
) -> None:
    server, witness = half_pushed(tmp_path, Broken)
    server._early.clear()
    end(server, witness)
    ((last, on_disk),) = [each for each in witness.sent if each[0].kind == "failed"]
    assert "the update from version 0 has failed" in last.body["why"]
    server._snapshots.missing = lambda: ["t"]  # type: ignore[union-attr, method-assign]
    server._save("t")
    assert on_disk == 0
    (file,) = tmp_path.rglob("*.safetensors")
    assert [each.tobytes() for each in saved_files.read(file).saved.values] == payloads(
        values_of(-1, 0)
    )
    migration = Migration(server, 0, Mock(), Mock())
    assert migration.standing()["tables"] == {}  # No change begins that would move it.
    saves = ServerCheckpoints(server, 0, lambda: None)
    for what, phase in (("save", "begin"), ("load", "read")):
        body = {"attempt": [1], "phase": phase, "tables": [["t", 1, False, 0]], "servers": 1}
        body["directory"] = str(tmp_path / "saved")
        (answer,) = saves._answer(PEER, Message(what, 1, body=body))
        assert answer.message.kind == "failed"
        assert answer.message.body["why"] == f"the table 't': {last.body['why']}"
    started(server, "other", 0)


def test_a_state_that_cannot_be_copied_is_said_to_the_workers(tmp_path: Path) -> None:
    _, witness = half_pushed(tmp_path, NoState)
    assert [each.kind for each, _ in witness.sent].count("failed") == 2  # A push, and a pull.
    why = [each.body["why"] for each, _ in witness.sent if each.kind == "failed"]
    assert len(set(why)) == 1
    assert "copying its state has failed" in why[0]


def test_a_load_that_an_optimizer_refuses_ends_the_job_with_its_words(tmp_path: Path) -> None:
    """Other servers have loaded: nobody may go on with what was here before."""
    server, _ = half_pushed(tmp_path)
    wrong = {"0": np.zeros(1, np.float32)}
    with pytest.raises(TableLostError, match=r"'t': taking values and a state has .*KeyError"):
        server.take_loaded("t", 1, server.tables["t"].copy().values, wrong, 0, {})


def test_an_optimizer_that_cannot_be_made_is_said_to_its_workers() -> None:
    def new_updater(described: TableDescription) -> Updater:
        if described.name == "wrong":
            raise TypeError("no such device")
        return Added()

    server = Server(cast("Listener", Queue()), new_updater, incarnation=1, workers=[0])
    migration = Migration(server, 0, Mock(), Mock())
    described = describe_table(SPECS, blocks(), Mode(SYNC), average=True)
    message = Message("start", 1, "wrong", 0, 1, {"worker": 0, "table": described})
    (answer,) = server.answer(PEER, message)
    assert "cannot make its optimizer: TypeError('no such device')" in answer.message.body["why"]
    migration.look({"layout": 1, "layout_servers": 1, "change": None, "load": 0, "wanted": 1})
    started(server, "other", 0)
