"""What a server answers first, and what is on disk before anybody hears of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from hvdlite.ps.connections.channel import Listener
from hvdlite.ps.connections.messages import Message
from hvdlite.ps.layouts.blocks import TensorSpec, blocks_of
from hvdlite.ps.layouts.layout import place
from hvdlite.ps.server.server import Server
from hvdlite.ps.server.snapshots import SnapshotFolder
from hvdlite.ps.tables.clocks import ASYNC, SYNC, Mode
from hvdlite.ps.tables.description import describe_table
from hvdlite.ps.tables.updater import Added
from tests.ps.test_tables import SPECS, Momentum, blocks, payloads, values_of

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


def half_pushed(folder: Path) -> tuple[Server, Witness]:
    """Return a server with a table of two workers, of which one has pushed, and pulls."""
    witness = Witness(folder)
    server = Server(
        cast("Listener", witness), lambda _: Momentum(), incarnation=1, workers=[0, 1],
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
