"""The store by which the members of a group of c10d find each other."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import msgpack
import pytest

from hvdlite.common.connections.prove import Party
from hvdlite.torch.accelerators.store import MEMBER, STORE, StoreClient, StoreServer
from tests.common.connections.ends import SECONDS, strangers_are_closed
from tests.ranks import run_threads
from tests.torch.accelerators.fakes import wait_for

pytestmark = pytest.mark.timeout(60)


@contextmanager
def serving(members: int) -> Iterator[tuple[StoreServer, list[StoreClient]]]:
    server = StoreServer(("127.0.0.1",))
    clients = [StoreClient(server.offer, SECONDS) for _ in range(members)]
    try:
        yield server, clients
    finally:
        for client in clients:
            client.close()
        server.close()


def address(server: StoreServer) -> tuple[str, int]:
    ((host, _, port),), _ = msgpack.unpackb(server.offer)
    return host, port


def test_values_are_those_of_all_members() -> None:
    with serving(2) as (_, (one, other)):
        one.set("a", b"1")
        assert other.get("a") == b"1"
        assert (other.add("n", 3), one.add("n", 4), one.get("n")) == (3, 7, b"7")
        assert one.compare_set("a", "1", "2") == b"2" == other.compare_set("a", "1", "3")
        assert one.compare_set("none", "x", "3") == b"x" and not other.check(["none"])
        assert other.check(["a", "n"]) and one.num_keys() == 2
        assert one.delete_key("a") and not other.delete_key("a")
        again = one.clone()
        assert again.get("n") == b"7"
        again.close()
        with pytest.raises(RuntimeError, match=r"no other rank has set \['a'\] after 0.1 s"):
            other.wait(["a"], timedelta(seconds=0.1))


def test_a_client_is_for_all_threads_while_one_waits() -> None:
    with serving(1) as (server, (client,)):
        waiting = threading.Thread(target=client.wait, args=(["a", "b"],), daemon=True)
        waiting.start()
        wait_for(lambda: len(server._waiting) == 1)

        def count(thread: int) -> None:
            for _ in range(50):
                client.add("n", 1)

        run_threads(4, count)
        assert client.get("n") == b"200"
        client.set("a", "")
        assert waiting.is_alive()
        client.set("b", "")
        waiting.join(SECONDS)
        assert not waiting.is_alive()


@pytest.mark.parametrize("ends", ["the server", "the client"])
def test_who_waits_hears_of_an_end_at_once(ends: str) -> None:
    with serving(2) as (server, (client, other)):

        def wait(thread: int) -> None:
            if thread == 2:
                wait_for(lambda: len(server._waiting) == 2)
                (server if ends == "the server" else client).close()
                return
            with pytest.raises(ConnectionError, match="the c10d store has ended during wait"):
                client.wait([f"never {thread}"])

        run_threads(3, wait)
        if ends == "the client":
            other.set("a", "")
            assert not server._waiting
        else:
            with pytest.raises(RuntimeError, match="the store of the first rank is not reached"):
                other.clone()


def test_strangers_are_closed_while_a_member_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdlite.common.connections.service.STRANGER_SECONDS", 0.3)
    with serving(1) as (server, (client,)):
        waiting = threading.Thread(target=client.wait, args=(["a"],), daemon=True)
        waiting.start()
        wait_for(lambda: len(server._waiting) == 1)
        strangers_are_closed(address(server), Party(b"a guess", MEMBER, STORE))
        client.set("a", "")
        waiting.join(SECONDS)
        assert not waiting.is_alive()


def test_a_store_is_reached_at_the_wanted_addresses_alone() -> None:
    with serving(0) as (server, _), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", address(server)[1]), SECONDS)


def test_a_server_that_does_not_know_the_token_is_not_believed() -> None:
    with serving(0) as (server, _):
        endpoints, token = msgpack.unpackb(server.offer)
        offer = msgpack.packb((endpoints, bytes(len(token))))
        with pytest.raises(RuntimeError, match=r"not reached: 127\.0\.0\.1.* has another secret"):
            StoreClient(offer, SECONDS)
