"""The thread of a worker's connections: what fails in it, and what fails it."""

from __future__ import annotations

import itertools
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.ps.connections import client as client_module
from hvdlite.ps.connections import memory_exchange
from hvdlite.ps.connections.channel import Caller, Listener, new_context
from hvdlite.ps.connections.client import Client
from hvdlite.ps.connections.messages import Message
from hvdlite.ps.connections.shared_memory import SharedMemory
from tests.ps.cluster import Cluster, trainers, wait_until

NewCluster = Callable[..., Cluster]


def test_an_error_in_the_thread_fails_all_that_waits_and_all_that_comes(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = new_cluster(2, 2)
    first, second = trainers(cluster, 2)

    def fail(*_words: object) -> None:
        raise ZeroDivisionError("a defect")

    for handle in first.push():  # Both servers have it: the other worker waits for it at the end.
        handle.wait()
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
        lambda: first.table.pull(first.values), first.push, first.worker.barrier,
        lambda: first.worker.declare("u", first.table.specs, first.table._options, list),
    ):  # fmt: skip
        with pytest.raises(HorovodInternalError, match="talks with servers has failed"):
            for handle in call() or ():
                handle.wait()
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


def test_a_process_may_connect_while_the_thread_goes_through_its_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it does with the scheduler, when the thread has just begun."""
    reached, connected = threading.Event(), threading.Event()
    poll = client_module.poll

    def slowly(callers: Mapping[Caller, object], wake_fd: int, seconds: float) -> list[Caller]:
        each = iter(callers)
        first = [*itertools.islice(each, 1)]
        if first:
            reached.set()
            assert connected.wait(20)
        return poll(dict.fromkeys([*first, *each]), wake_fd, seconds)

    monkeypatch.setattr(client_module, "poll", slowly)
    client = Client(b"a worker")
    client.connect("tcp://127.0.0.1:1")
    client.call(lambda: None)
    assert reached.wait(20)
    client.connect("tcp://127.0.0.1:2")
    connected.set()
    handle = client.ask(lambda done: done(Message("done")))
    assert handle.ended_within(20)
    assert handle.wait().kind == "done"  # The thread has not failed.
    client.close()


def test_what_waits_fails_when_its_client_is_closed_and_what_comes_later() -> None:
    client = Client(b"a worker")
    asked = client.ask(lambda _done: None)
    client.close()
    for handle in (asked, client.ask(lambda done: done(Message("done")))):
        assert handle.ended_within(20)
        with pytest.raises(HorovodInternalError, match="its connections are closed"):
            handle.wait()


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_memory_is_shared_again_when_there_are_descriptors_again() -> None:
    memory, name = SharedMemory(), memory_exchange.new_name()
    opened = memory_exchange.MemoryListener(memory, name)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with no_descriptors():
            connection.connect(memory_exchange._path(name))
            with pytest.raises(OSError, match="Too many open files"):
                os.dup(0)
            opened._thread.join(0.3)
            assert opened._thread.is_alive()
        memory_exchange._send(connection, 7, b"a worker", memory)
        connection.settimeout(20)
        session, _, window = memory_exchange._receive(connection)
        assert session == 7
        window.close()
    finally:
        connection.close()
        opened.close()
        memory.close()
    assert not opened.sharings


def test_a_connection_may_end_while_another_one_is_read() -> None:
    """As a worker hears from the scheduler that a server has gone which has just answered it."""
    context = new_context()
    listeners = [Listener(context, "tcp://127.0.0.1:*") for _ in range(2)]
    client = Client(b"a peer")
    heard: list[Message] = []
    try:
        first, second = connections = [client.connect(each.address) for each in listeners]

        def end_the_second(message: Message) -> None:
            heard.append(message)
            client.disconnect(second)

        first.receive = end_the_second
        client.call(lambda: [each.send(Message("beat")) for each in connections])
        asked = [listener.receive(20) for listener in listeners]
        held = threading.Event()

        def wait_for_both() -> None:
            held.set()
            for connection in connections:
                assert connection.caller.socket.poll(20_000)

        client.call(wait_for_both)
        assert held.wait(20)
        for listener, received in zip(listeners, asked, strict=True):
            assert received is not None
            listener.send(received[0], Message("beat", received[1].request))
        wait_until(lambda: bool(heard))
        later = client.ask(lambda done: done(Message("done")))
        assert later.ended_within(20)
        assert later.wait().kind == "done"  # The thread has not failed.
    finally:
        client.close()
        for listener in listeners:
            listener.close()
        context.term()
