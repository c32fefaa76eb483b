"""Agents connect back to the launcher, and nobody else does."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hvdlite.common.connections import prove
from hvdlite.common.connections.frames import frame, pack
from hvdlite.common.connections.prove import Challenge
from hvdlite.launcher.agents import call_back
from hvdlite.launcher.agents.call_back import Listener, own_addresses
from hvdlite.launcher.agents.channel import Channel
from hvdlite.launcher.processes.event_loop import EventLoop
from tests.descriptors import no_free_descriptor


class Loop(EventLoop):
    """The launcher's loop, with who has come."""

    def __init__(self) -> None:
        super().__init__()
        self.came: list[tuple[socket.socket, str]] = []

    def accepted(self, connection: socket.socket, name: str) -> None:
        self.came.append((connection, name))

    def run(self, until: Callable[[], Any], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline
            self.run_once(0.01)


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    for connection, _ in made.came:
        connection.close()
    made.close()


@pytest.fixture
def listener(loop: Loop) -> Iterator[Listener]:
    made = Listener(loop, ["127.0.0.1"], loop.accepted)
    yield made
    made.close()


def call(listener: Listener, secret: str = "", **given: Any) -> list[socket.socket | str]:
    """Call the listener in a thread; gives the connection, or the error, when it is there."""
    result: list[socket.socket | str] = []

    def agent() -> None:
        arguments = {"secret": secret or listener.secret, "name": "node1", "seconds": 5.0, **given}
        try:
            result.append(call_back.call_back(listener.addresses, **arguments))
        except OSError as error:
            result.append(str(error))

    threading.Thread(target=agent, daemon=True).start()
    return result


def stranger(listener: Listener) -> socket.socket:
    host, _, port = listener.addresses[0].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_an_agent_connects_and_is_known_by_its_name(loop: Loop, listener: Listener) -> None:
    result = call(listener, name="rack1-node07.example.org")
    loop.run(lambda: result and loop.came)
    (theirs,), ((ours, name),) = result, loop.came
    assert isinstance(theirs, socket.socket)
    assert name == "rack1-node07.example.org"
    theirs.sendall(b"hello")
    ours.setblocking(True)
    assert ours.recv(5) == b"hello"
    ours.sendall(b"job")
    assert theirs.recv(3) == b"job"
    theirs.close()


def test_the_secret_of_another_job_is_refused_by_both_ends(loop: Loop, listener: Listener) -> None:
    result = call(listener, secret="0" * 32, seconds=0.0)
    loop.run(lambda: result)
    assert "another secret" in str(result[0])
    assert loop.came == []


def test_an_agent_does_not_believe_a_listener_without_the_secret() -> None:
    """It would take the commands that it runs from whoever has the launcher's port now."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(Challenge.new().pack())
                connection.recv(prove.PROVEN_CLAIM_BYTES, socket.MSG_WAITALL)
                connection.sendall(prove.REPLY.pack(prove.ACCEPTED, prove.PROOF_BYTES))
                connection.sendall(os.urandom(prove.PROOF_BYTES))
                connection.recv(1)

        threading.Thread(target=answer, daemon=True).start()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(OSError, match="the launcher does not know the secret of this job"):
            call_back.call_back([address], "secret", "node1", 0.0)


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(300), b"\xff" * 17, bytes(49), bytes(48)]
)
def test_whoever_is_no_agent_is_not_heard(loop: Loop, listener: Listener, said: bytes) -> None:
    with stranger(listener) as connection:
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        ended: list[bool] = []

        def read() -> None:
            try:
                while connection.recv(100):
                    pass
            except OSError:
                pass
            ended.append(True)

        threading.Thread(target=read, daemon=True).start()
        loop.run(lambda: ended)
    assert loop.came == []
    result = call(listener)
    loop.run(lambda: result and loop.came)  # an agent comes in all the same
    assert isinstance(result[0], socket.socket)
    result[0].close()


def test_silent_strangers_are_forgotten(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_back, "MOST_STRANGERS", 2)
    listener = Listener(loop, ["127.0.0.1"], loop.accepted)
    silent = [stranger(listener) for _ in range(5)]
    result = call(listener)
    loop.run(lambda: result and loop.came)
    assert isinstance(result[0], socket.socket)
    for each in (*silent, result[0], listener):
        each.close()


def test_without_a_free_descriptor_the_launcher_does_not_spin(
    loop: Loop, listener: Listener
) -> None:
    """Those who knock wait; an agent that tries again comes in later."""
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(stranger(listener))
        with no_free_descriptor():
            calls, end = 0, time.monotonic() + 0.5
            while time.monotonic() < end:
                calls += loop.run_once(0.01)
        assert calls <= 12
    result = call(listener)
    loop.run(lambda: result and loop.came)
    assert isinstance(result[0], socket.socket)
    result[0].close()


def test_each_address_is_tried(loop: Loop) -> None:
    listener = Listener(loop, ["127.0.0.1"], loop.accepted)
    result: list[socket.socket] = []
    addresses = ["127.0.0.1:1", "name.invalid:7", *listener.addresses]
    threading.Thread(
        target=lambda: result.append(call_back.call_back(addresses, listener.secret, "n")),
        daemon=True,
    ).start()
    loop.run(lambda: result and loop.came)
    result[0].close()
    listener.close()


def test_who_cannot_reach_the_launcher_says_why() -> None:
    with pytest.raises(OSError, match=r"127\.0\.0\.1:1 .*refused"):
        call_back.call_back(["127.0.0.1:1"], "secret", "node1", 0.0)


def test_addresses_are_those_that_lead_to_the_hosts() -> None:
    assert own_addresses(["127.0.0.1", "localhost", "name.invalid"])[0] == "127.0.0.1"
    assert own_addresses(["name.invalid"]) == []


def test_without_a_known_host_everyone_may_knock(loop: Loop) -> None:
    listener = Listener(loop, ["name.invalid"], loop.accepted)
    name, _, port = listener.addresses[0].rpartition(":")
    assert (name, int(port) > 0) == (socket.gethostname(), True)
    listener.close()


def test_the_secret_is_no_argument(listener: Listener) -> None:
    assert listener.secret not in " ".join(listener.addresses)


def test_an_end_that_is_done_with_writing_is_noticed() -> None:
    """An agent ends when the launcher has nothing more to say, and its last words still come."""
    loop, heard = EventLoop(), []
    ours, theirs = socket.socketpair()
    with theirs:
        fd = ours.detach()
        channel = Channel(
            loop, fd, os.dup(fd), received=lambda kind, _: heard.append(kind),
            ended=lambda: heard.append("ended"),
        )  # fmt: skip
        channel.close_writing()
        theirs.settimeout(10)
        assert theirs.recv(1) == b""
        theirs.sendall(frame(pack(["last"])))
        theirs.shutdown(socket.SHUT_WR)
        while "ended" not in heard:
            assert loop.run_once(10)
    assert heard == ["last", "ended"]
    loop.close()
