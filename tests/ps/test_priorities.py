"""Pulls that wait at the same time are answered first layers first."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import numpy as np

from hvdlite.ps.connections.channel import Listener
from hvdlite.ps.connections.messages import Message
from hvdlite.ps.layouts.blocks import TensorSpec, blocks_of
from hvdlite.ps.layouts.layout import place
from hvdlite.ps.server.server import Server
from hvdlite.ps.tables.clocks import ASYNC, Mode
from hvdlite.ps.tables.description import describe_table
from hvdlite.ps.tables.updater import Added

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
