"""What a worker hears of a server that does not let it in, and of names that it does not know."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from hvdlite.common.base.errors import (
    ConfigError,
    HorovodInternalError,
    HorovodVersionMismatchError,
)
from hvdlite.common.connections.address import Address
from hvdlite.numpy import ps
from hvdlite.ps import context
from hvdlite.ps.connections.channel import Listener
from hvdlite.ps.connections.client import Client
from hvdlite.ps.connections.messages import SERVER, Message
from hvdlite.ps.server.server import Server
from hvdlite.ps.tables.updater import Added
from hvdlite.ps.worker.server_link import ServerLink
from tests.ps.cluster import Cluster, Loop
from tests.ps.test_versions import SAYS, other_version


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client(b"worker 0", b"the right one")
    yield made
    made.close()


def linked(client: Client, address: str) -> ServerLink:
    link = ServerLink(client, 0, lambda: 0)
    client.call(lambda: link.follow(address))
    return link


def asked(client: Client, link: ServerLink) -> Message:
    """Return what a server answers to a request; raise what it refuses with."""
    handle = client.ask(lambda done: link.ask(Message("save"), done))
    assert handle.ended_within(20)
    answer: Message = handle.wait()
    return answer


def test_a_server_of_another_version_is_named(client: Client) -> None:
    """Whether it has refused this process before it is asked, or after that."""
    with other_version() as address:
        link = linked(client, address)
        for _ in range(2):
            with pytest.raises(HorovodVersionMismatchError, match=SAYS):
                asked(client, link)


def test_a_server_with_another_token_is_named(client: Client) -> None:
    def body(ended: Callable[[], bool]) -> None:
        listener = Listener(Address("127.0.0.1"), SERVER, b"another")
        addresses.append(listener.address)
        ready.set()
        Server(listener, lambda _: Added(), incarnation=1, workers=[0]).serve(ended)
        listener.close()

    addresses: list[str] = []
    ready = threading.Event()
    server = Loop(body)
    try:
        assert ready.wait(20)
        with pytest.raises(ConfigError, match="server 0 says: HVDLITE_PS_TOKEN is another one"):
            asked(client, linked(client, addresses[0]))
    finally:
        server.end()


def test_a_name_that_nobody_has_begun_is_named(
    new_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = new_cluster(1, 1)
    worker = cluster.worker("worker 0")
    held = context.Context(cluster.settings, worker)
    monkeypatch.setattr(context._Held, "context", held)
    with pytest.raises(HorovodInternalError, match="no worker has begun 'weights': push it"):
        ps.pull("weights")
    ps.push("weights", np.ones(2))
    assert ps.pull("weights").shape == (2,)
