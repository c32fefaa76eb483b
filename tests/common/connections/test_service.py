"""A service that answers in any order, and clients that many threads use."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from hvdlite.common.connections import prove
from hvdlite.common.connections.address import Address
from hvdlite.common.connections.frames import PREFIX, frame, pack
from hvdlite.common.connections.prove import Challenge, Claim
from hvdlite.common.connections.service import Client, Service, Wait
from tests.common.children import living_child
from tests.common.connections.ends import SECONDS, SECRET, SERVER, WORKER, tcp
from tests.ranks import run_threads

pytestmark = pytest.mark.timeout(60)
MOST_BYTES = 1000


class Words(Service):
    """Keeps words, for which members may wait."""

    def __init__(self, listening: socket.socket) -> None:
        self.address = Address(*listening.getsockname())
        self.words: set[str] = set()
        methods: dict[str, Callable[..., Any]] = {
            "say": self._say,
            "hear": self._hear,
            "refuse": self._refuse,
            "object": object,
        }
        super().__init__("words", [listening], SERVER, methods, MOST_BYTES)

    def _say(self, word: str) -> int:
        self.words.add(word)
        self.look()
        return len(self.words)

    def _hear(self, word: str, seconds: float | None) -> Wait:
        return Wait(lambda: word in self.words, lambda found: found, seconds)

    def _refuse(self, text: str) -> None:
        raise IndexError(text)


@contextmanager
def serving() -> Iterator[tuple[Words, Client]]:
    service = Words(tcp())
    client = Client([service.address], WORKER, MOST_BYTES)
    try:
        yield service, client
    finally:
        client.close()
        service.close()


def test_answers_come_when_they_are_ready_whoever_waits() -> None:
    """A chain: each thread says the word for which the thread before it waits."""
    with serving() as (_, client):

        def main(thread: int) -> Any:
            if thread < 7:
                assert client.ask("hear", f"word {thread + 1}", SECONDS) is True
            return client.ask("say", f"word {thread}")

        assert run_threads(8, main) == [8, 7, 6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("seconds", [0.05, 0, -1.0])
def test_a_wait_has_a_limit(seconds: float) -> None:
    with serving() as (service, client):
        assert client.ask("hear", "never", seconds) is False
        assert not service._waiting


@pytest.mark.parametrize("seconds", [None, 1e300, float("inf"), float("nan")])
def test_a_wait_may_be_long(seconds: float | None) -> None:
    with serving() as (_, client):

        def main(thread: int) -> Any:
            return client.ask("say", "late") if thread else client.ask("hear", "late", seconds)

        assert run_threads(2, main) == [True, 1]


def test_errors_come_to_who_has_asked_and_end_nothing() -> None:
    with serving() as (_, client):
        with pytest.raises(IndexError, match="no such word"):
            client.ask("refuse", "no such word")
        for nonsense in (["say"], ["say", []], ["hear", "x", "soon"], ["object"]):
            with pytest.raises(RuntimeError):
                client.ask(*nonsense)
        assert client.ask("say", "x") == 1


@pytest.mark.parametrize(
    "said",
    [
        PREFIX.pack(MOST_BYTES + 1, 0),  # Too long: nobody waits for its bytes.
        PREFIX.pack(8, 1 << 20),
        frame(b"\xc1\xc1\xc1"),
        frame(pack(["ask", 1, "close"])),
        frame(pack(["ask", "one", "say", "x"])),
        frame(pack(["answer", 1, "", 1])),
    ],
)
def test_a_member_that_breaks_the_protocol_is_closed(said: bytes) -> None:
    with serving() as (service, client):
        address = service.address[:2]
        with socket.create_connection(address, timeout=SECONDS) as member:
            challenge = Challenge.unpack(member.recv(prove.CHALLENGE.size, socket.MSG_WAITALL))
            claim = prove.prove_claim(SECRET, challenge, Claim.new(WORKER, b""))
            member.sendall(claim + prove.GO + said)
            member.recv(prove.REPLY.size + prove.PROOF_BYTES, socket.MSG_WAITALL)
            assert not member.recv(1)
        assert client.ask("say", "x") == 1


def test_a_member_that_has_gone_waits_no_longer() -> None:
    with serving() as (service, client):
        with closing(Client([service.address], WORKER, MOST_BYTES)) as other:
            ends = threading.Thread(target=lambda: hear_until_the_end(other), daemon=True)
            ends.start()
            while not service._waiting:
                client.ask("hear", "", 0)
        ends.join(SECONDS)
        assert not ends.is_alive()
        while service._waiting:  # The end comes by another connection than the questions.
            client.ask("say", "x")


def hear_until_the_end(client: Client) -> None:
    with pytest.raises(ConnectionError, match="the server has ended during hear"):
        client.ask("hear", "never", None)


def test_nobody_is_reached_at_no_address() -> None:
    with pytest.raises(ConnectionError, match="no address"):
        Client([], WORKER, MOST_BYTES)
    with tcp() as listening:
        address = Address(*listening.getsockname())
    with pytest.raises(ConnectionError, match="connection refused"):
        Client([address], WORKER, MOST_BYTES)


def test_a_forked_child_uses_nothing_of_its_parent() -> None:
    reads, writes = os.pipe()

    def use_it() -> None:
        try:
            client.ask("say", "from the child")
        except ConnectionError:
            client.close()
            service.close()
            os.write(writes, b"refused")

    with serving() as (service, client):
        other = Client([service.address], WORKER, MOST_BYTES)
        with living_child(use_it):
            assert os.read(reads, 10) == b"refused"
            assert client.ask("say", "from the parent") == 1
            service.close()
            with pytest.raises(ConnectionError):
                client.ask("say", "x")
        other.close()
    os.close(reads)
    os.close(writes)
