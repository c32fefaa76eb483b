"""What a worker hears of a server that does not let it in, and of names that it does not know."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import msgpack
import numpy as np
import pytest
import zmq

from hvdlite.common.base.errors import (
    ConfigError,
    HorovodInternalError,
    HorovodVersionMismatchError,
)
from hvdlite.numpy import ps
from hvdlite.ps import context
from hvdlite.ps.connections.channel import Listener, new_context
from hvdlite.ps.connections.client import Client
from hvdlite.ps.connections.messages import PROTOCOL, Message
from hvdlite.ps.server.server import Server
from hvdlite.ps.tables.updater import Added
from hvdlite.ps.worker.server_link import ServerLink
from tests.ps.cluster import Cluster, Loop


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client(b"worker 0")
    yield made
    made.close()


def asked(client: Client, address: str) -> Message:
    """Return what a server answers to a request; raise what it refuses with."""
    link = ServerLink(client, 0, lambda: 0, b"the right one")
    client.call(lambda: link.follow(address))
    handle = client.ask(lambda done: link.ask(Message("save"), done))
    assert handle.ended_within(20)
    answer: Message = handle.wait()
    return answer


def test_a_server_of_another_version_is_named(client: Client) -> None:
    zmq_context = zmq.Context()
    socket = zmq_context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    ended = threading.Event()

    def answer() -> None:
        while not ended.is_set():
            if socket.poll(20):
                peer, *_ = socket.recv_multipart()
                socket.send_multipart([peer, msgpack.packb([PROTOCOL + 1, "refused"])])

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        words = rf"protocol {PROTOCOL} is installed here, but another rank runs {PROTOCOL + 1}: in"
        with pytest.raises(HorovodVersionMismatchError, match=words):
            asked(client, f"tcp://127.0.0.1:{port}")
    finally:
        ended.set()
        thread.join(20)
        socket.close()
        zmq_context.term()


def test_a_server_with_another_token_is_named(client: Client) -> None:
    def body(ended: Callable[[], bool]) -> None:
        zmq_context = new_context()
        listener = Listener(zmq_context, "tcp://127.0.0.1:*")
        addresses.append(listener.address)
        ready.set()
        token = b"another"
        Server(listener, lambda _: Added(), incarnation=1, workers=[0], token=token).serve(ended)
        listener.close()
        zmq_context.term()

    addresses: list[str] = []
    ready = threading.Event()
    server = Loop(body)
    try:
        assert ready.wait(20)
        with pytest.raises(ConfigError, match="server 0 says: HVDLITE_PS_TOKEN is another one"):
            asked(client, addresses[0])
    finally:
        server.end()


def test_a_name_that_nobody_has_begun_is_named(
    new_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = new_cluster(1, 1)
    worker = cluster.worker("worker 0")
    held = context.Context(cluster.settings, worker, is_rank=False)
    monkeypatch.setattr(context._Held, "context", held)
    with pytest.raises(HorovodInternalError, match="no worker has begun 'weights': push it"):
        ps.pull("weights")
    ps.push("weights", np.ones(2))
    assert ps.pull("weights").shape == (2,)
