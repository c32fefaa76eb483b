"""The thread of a worker's connections: what fails in it, and what fails it."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.connections.address import Address
from hvdlite.ps.connections import client as client_module
from hvdlite.ps.connections.channel import Listener
from hvdlite.ps.connections.client import Client
from hvdlite.ps.connections.connection import Connection
from hvdlite.ps.connections.messages import SERVER, Message
from hvdlite.ps.worker.ordered_operations import OrderedOperations
from tests.descriptors import no_free_descriptor
from tests.ps.cluster import NewCluster, wait_until, with_two


def test_an_error_in_the_thread_fails_all_that_waits_and_all_that_comes(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, first, second = with_two(new_cluster, 2)

    def fail(*_words: object) -> None:
        raise ZeroDivisionError("a defect")

    first.push().wait()  # Both servers have it: the other worker waits for it at the end.
    # In sync, its pull waits for the other worker.
    waiting = [first.worker._client.ask(shard.pull) for shard in first.table._shards]
    monkeypatch.setattr(first.table._shards[0], "receive", fail)
    second.push_ones()
    for handle in waiting:
        assert handle.ended_within(20)
    errors = [handle.error for handle in waiting]
    assert "ZeroDivisionError('a defect')" in str(errors[0])
    assert isinstance(errors[0], HorovodInternalError)
    assert isinstance(errors[0].__cause__, ZeroDivisionError)
    for call in (
        lambda: first.table.pull(first.values), lambda: first.push().wait(), first.worker.barrier,
        lambda: first.worker.declare("u", first.table.specs, first.table.options, list),
    ):  # fmt: skip
        with pytest.raises(HorovodInternalError, match="talks with servers has failed"):
            call()
    second.table.pull(second.values)
    first.worker.leave()  # Which still works.
    wait_until(lambda: cluster.state.membership.workers() == [1])


def test_a_call_that_raises_fails_its_own_handle() -> None:
    client = Client(b"a worker")
    handle = client.ask(lambda _done: {}["a word"])
    assert handle.ended_within(20)
    with pytest.raises(HorovodInternalError, match="KeyError"):
        handle.wait()
    client.close()


def test_calls_gather_until_somebody_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "GATHER_SECONDS", 60.0)
    client, made = Client(b"a worker"), list[str]()
    client.call(lambda: made.append("a call"))  # Its thread has done nothing for long.
    wait_until(lambda: bool(made) and client._gathers)
    client.call(lambda: made.append("another"))
    assert made == ["a call"]
    handle = client.ask(lambda done: done(Message("done")))
    assert handle.ended_within(20)
    assert made == ["a call", "another"]
    client.close()


def test_what_waits_fails_when_its_client_is_closed_and_what_comes_later() -> None:
    client = Client(b"a worker")
    asked = client.ask(lambda _done: None)
    client.close()
    for handle in (asked, client.ask(lambda done: done(Message("done")))):
        assert handle.ended_within(20)
        with pytest.raises(HorovodInternalError, match="its connections are closed"):
            handle.wait()


def test_a_process_connects_when_there_are_descriptors_again() -> None:
    listener = Listener(Address("127.0.0.1"), SERVER, b"a secret")
    listener.open_memory()
    client = Client(b"worker 0", b"a secret")
    try:
        with no_free_descriptor():
            connection = client.connect(listener.address, SERVER)
            client.call(lambda: connection.send(Message("beat")))
            wait_until(lambda: "open files" in connection.caller.trouble)
        received = listener.receive(20)
        assert received == (b"worker 0", Message("beat", 1))
    finally:
        client.close()
        listener.close()


def test_a_connection_may_end_while_another_one_is_read() -> None:
    """As a worker hears from the scheduler that a server has gone which has just answered it."""
    listeners = [Listener(Address("127.0.0.1"), SERVER) for _ in range(2)]
    client = Client(b"a peer")
    heard: list[Message] = []
    try:
        first, second = connections = [client.connect(each.address, SERVER) for each in listeners]

        def end_the_other(one: Connection, other: Connection) -> Callable[[Message], None]:
            def receive(message: Message) -> None:
                heard.append(message)
                client.disconnect(other)

            return receive

        first.receive, second.receive = end_the_other(first, second), end_the_other(second, first)
        client.call(lambda: [each.send(Message("beat")) for each in connections])
        asked = [listener.receive(20) for listener in listeners]
        held, answered = threading.Event(), threading.Event()

        def wait_for_both() -> None:
            held.set()
            assert answered.wait(20)

        client.call(wait_for_both)
        assert held.wait(20)
        for listener, received in zip(listeners, asked, strict=True):
            assert received is not None
            listener.send(received[0], Message("beat", received[1].request))
            assert listener.receive(0.001) is None  # By which the answer goes.
        answered.set()
        wait_until(lambda: bool(heard))
        later = client.ask(lambda done: done(Message("done")))
        assert later.ended_within(20)
        assert later.wait().kind == "done"  # The thread has not failed.
        assert len(heard) == 1
    finally:
        client.close()
        for listener in listeners:
            listener.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_connection_that_breaks_is_made_again_and_asks_again(encrypted: bool) -> None:
    listener = Listener(Address("127.0.0.1"), SERVER, b"a secret", encrypted=encrypted)
    client = Client(b"worker 0", b"a secret", encrypted=encrypted)
    try:
        connection = client.connect(listener.address, SERVER)
        heard: list[Message] = []
        connection.receive = heard.append
        client.call(lambda: [connection.send(Message("beat")) for _ in range(2)])
        for _ in range(3):  # What was asked is asked again.
            peer, _ = listener.receive(20) or (b"", Message(""))
            assert peer == b"worker 0" and not heard
            listener.drop(peer)
        while len(heard) < 2:
            received = listener.receive(0.01)
            if received is not None:
                listener.send(received[0], Message("beat", received[1].request))
        assert {each.request for each in heard} == {1, 2}
    finally:
        client.close()
        listener.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_large_payloads_come_as_they_were_sent(encrypted: bool) -> None:
    listener = Listener(Address("127.0.0.1"), SERVER, b"a secret", encrypted=encrypted)
    client = Client(b"worker 0", b"a secret", encrypted=encrypted)
    made = np.random.default_rng(5)
    sizes = [0, 1, 16384, 3_000_001, 70_000]
    sent = [made.integers(0, 256, size, np.uint8) for size in sizes]
    payloads = [memoryview(each) for each in sent]
    try:
        connection = client.connect(listener.address, SERVER)
        heard: list[Message] = []
        connection.receive = heard.append
        client.call(lambda: connection.send(Message("push", table="t", payloads=payloads)))
        peer, message = listener.receive(20) or (b"", Message(""))
        assert [bytes(each) for each in message.payloads] == [bytes(each) for each in sent]
        listener.send(peer, message._replace(kind="values"))
        while not heard:
            listener.receive(0.001)
        assert [bytes(each) for each in heard[0].payloads] == [bytes(each) for each in sent]
    finally:
        client.close()
        listener.close()


def test_a_message_has_as_many_arrays_as_a_large_table_has_blocks() -> None:
    listener = Listener(Address("127.0.0.1"), SERVER, b"a secret")
    client = Client(b"worker 0", b"a secret")
    payloads = [memoryview(each.to_bytes(2, "little")) for each in range(10_000)]
    try:
        connection = client.connect(listener.address, SERVER)
        client.call(lambda: connection.send(Message("take", table="t", payloads=payloads)))
        _, message = listener.receive(20) or (b"", Message(""))
        assert [bytes(each) for each in message.payloads] == [bytes(each) for each in payloads]
    finally:
        client.close()
        listener.close()


def test_many_operations_that_fail_at_once_fail_one_after_another() -> None:
    operations, first, results = OrderedOperations(), list[Any](), list[Any]()
    operations.push(first.append, results.append)
    for _ in range(5000):
        operations.push(lambda done: done(ValueError("rolled back")), results.append)
    assert results == []
    first[0](Message("pushed"))
    assert [type(each) for each in results] == [Message] + [ValueError] * 5000


def test_a_pull_follows_a_push_at_once_and_a_push_waits_for_all_before_it() -> None:
    operations, begun, ends = OrderedOperations(), list[str](), list[Any]()

    def begin(word: str) -> Callable[[Any], None]:
        return lambda done: begun.append(word) or ends.append(done)

    for word in ("push 0", "pull 0", "pull 1", "push 1"):
        add = operations.push if word.startswith("push") else operations.pull
        add(begin(word), lambda _result: None)
    assert begun == ["push 0", "pull 0"]
    ends[0](Message("pushed"))
    assert begun == ["push 0", "pull 0"]
    ends[1](Message("values"))
    assert begun == ["push 0", "pull 0", "pull 1"]
    ends[2](Message("values"))
    assert begun == ["push 0", "pull 0", "pull 1", "push 1"]


@pytest.mark.parametrize(
    ("near", "encrypted"),
    [
        *((True, False), (False, True)),
        *(pytest.param(each, each, marks=pytest.mark.soak) for each in (True, False)),
    ],
)
def test_what_has_not_begun_is_given_up_at_the_end(encrypted: bool, near: bool) -> None:
    """No descriptor is left, at whatever step of the beginning either end is closed."""
    gc.collect()  # What tests before have left, which may be closed meanwhile.
    before = len(os.listdir("/proc/self/fd"))
    for steps in range(14):
        listener = Listener(Address("127.0.0.1"), SERVER, b"a secret", encrypted=encrypted)
        if near:
            listener.open_memory()
        client = Client(b"worker 0", b"a secret", encrypted=encrypted)
        connection = client.connect(listener.address, SERVER)
        for _ in range(steps):
            listener._loop.run_once(0.002)
        ends = [client.close, listener.close]
        for end in ends if steps % 2 else ends[::-1]:
            end()
        assert connection.caller.sharing is None
    gc.collect()
    # Threads of tests before may open and close others in between.
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_timer_wakes_the_thread_once() -> None:
    """It does not wait for calls first, as it does where others have something to answer."""
    client, sleeps, ticks = Client(b"worker idle"), list[object](), list[int]()
    over = threading.Event()
    run_once = client._loop.run_once

    def counted(timeout: float | None = None) -> bool:
        sleeps.append(timeout)
        return run_once(timeout)

    def tick() -> None:
        ticks.append(len(sleeps))
        if len(ticks) == 12:
            over.set()

    client._loop.run_once = counted  # type: ignore[method-assign]
    client.every(0.01, tick)
    assert over.wait(20)
    client.close()
    assert 10 <= ticks[11] - ticks[1] < 15


def test_a_connection_serves_a_thread_that_is_connected_before_it_is_whole() -> None:
    """As where the thread that makes it is held up, and the client's has dialled meanwhile."""
    heard: list[Message] = []

    class Hasty:
        sharing = None

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "connected":
                value()
                self.received(Message("beat", 7))

        def send(self, message: Message) -> None:
            heard.append(message)

    connection = Connection(Hasty(), time.monotonic)  # type: ignore[arg-type]
    connection.send(Message("hello"))
    assert heard == [Message("hello", 1)]
