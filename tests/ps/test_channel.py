"""Addresses at which processes of a cluster reach each other, and what goes on connections."""

from __future__ import annotations

import random
import socket
import threading
import time
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest

from hvdlite.common.base.errors import ConfigError, ProtocolError
from hvdlite.common.connections.address import Address
from hvdlite.ps.connections.channel import Caller, Listener
from hvdlite.ps.connections.connection import Connection
from hvdlite.ps.connections.messages import (
    FRAME_BYTES,
    INSIDE_BYTES,
    SCHEDULER,
    SERVER,
    Message,
    head_of,
    pack,
    parse,
    with_arrays,
)  # fmt: skip
from tests.ps.peers import LIMIT_SECONDS, Peer


@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
def test_a_listener_is_reached_by_both_versions_of_the_protocol(host: str) -> None:
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this host has no IPv6")
    listener = Listener(Address(host), SERVER)
    peer = Peer(listener.address, SERVER, token=b"")
    peer.caller.connected = lambda: peer.caller.send(Message("beat", 5))
    received = None
    while received is None:
        peer.caller.flush()
        peer.loop.run_once(0.01)
        received = listener.receive(0.01)
    peer.close()
    listener.close()
    assert received[1].request == 5


def test_a_slow_name_server_holds_up_no_other_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, resolve = threading.Event(), socket.getaddrinfo

    def slow(host: str, *words: Any, **more: Any) -> Any:
        if host == "slow.example":
            assert answers.wait(LIMIT_SECONDS)
            host = "127.0.0.1"
        return resolve(host, *words, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    listener = Listener(Address("127.0.0.1"), SERVER)
    thread = threading.Thread(target=serve, args=(listener, ended := threading.Event()))
    thread.start()
    peer = Peer(listener.address, SERVER, token=b"")
    port = listener.address.rpartition(":")[2]
    named = Caller(peer.loop, f"slow.example:{port}", SERVER, b"worker of a name")
    peer.wait(lambda: peer.caller.takes)
    assert not named.takes
    answers.set()
    peer.wait(lambda: named.takes)
    named.close()
    peer.close()
    ended.set()
    thread.join(LIMIT_SECONDS)
    listener.close()


def serve(listener: Listener, ended: threading.Event) -> None:
    while not ended.is_set():
        listener.receive(0.05)


def test_without_a_token_nobody_listens_where_other_hosts_come() -> None:
    with pytest.raises(ConfigError, match="is not the loopback interface: set HVDLITE_PS_TOKEN"):
        Listener(Address(), SCHEDULER)
    Listener(Address(), SCHEDULER, b"a secret").close()


def test_what_is_sent_together_arrives_in_its_order_with_small_and_large_payloads() -> None:
    """Small payloads lie among the messages of a frame, and large ones follow it."""
    sizes = [0, 1, INSIDE_BYTES, INSIDE_BYTES + 1, 3 * FRAME_BYTES]
    choose = random.Random(1)
    sent = [
        Message(
            choose.choice(["push", "values", "beat"]), number, "t", number, 1, {"number": number}
        )
        for number in range(1, 400)
    ]
    sent = [
        each
        if each.kind == "beat"
        else each._replace(
            payloads=[choose.randbytes(choose.choice(sizes)) for _ in range(choose.randrange(4))]
        )
        for each in sent
    ]
    listener = Listener(Address("127.0.0.1"), SERVER)
    peer = Peer(listener.address, SERVER, token=b"")
    threading.Thread(target=echo, args=(listener, len(sent))).start()
    peer.wait(lambda: peer.caller.takes)
    for each in sent:
        peer.caller.send(each)
    assert not peer.caller.takes
    peer.wait(lambda: len(peer.heard) == len(sent))
    peer.close()
    assert [plain(each) for each in peer.heard] == [plain(each) for each in sent]


def test_nothing_more_is_heard_on_a_connection_that_a_message_has_closed() -> None:
    listener, heard = Listener(Address("127.0.0.1"), SERVER), list[Message]()
    peer = Peer(listener.address, SERVER, token=b"")
    threading.Thread(target=echo, args=(listener, 3)).start()

    def hear(message: Message) -> None:
        heard.append(message)
        peer.caller.close()

    peer.caller.received = hear
    peer.wait(lambda: peer.caller.takes)
    for number in range(1, 4):  # They come in one frame, and so do their echoes.
        peer.caller.send(Message("beat", number))
    peer.wait(lambda: bool(heard))
    peer.loop.run_once(0.05)
    peer.close()
    assert [each.request for each in heard] == [1]


def test_answers_that_are_made_together_go_in_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a server looks for more requests before it has sent its last answers."""
    frames, receive = list[int](), Caller._receive

    def count(self: Caller, messages: Any, arrays: Any) -> None:
        frames.append(len(messages))
        receive(self, messages, arrays)

    monkeypatch.setattr(Caller, "_receive", count)
    listener = Listener(Address("127.0.0.1"), SERVER)
    peer = Peer(listener.address, SERVER, token=b"")
    thread = threading.Thread(target=answer_two, args=(listener,))
    thread.start()
    peer.wait(lambda: peer.caller.takes)
    peer.caller.send(Message("beat", 1))
    peer.caller.send(Message("beat", 2))
    peer.wait(lambda: len(peer.heard) == 2)
    peer.close()
    thread.join(LIMIT_SECONDS)
    assert frames == [2]


def answer_two(listener: Listener) -> None:
    asked = [listener.receive(LIMIT_SECONDS) for _ in range(2)]
    for received in asked:
        assert received is not None
        listener.send(*received)
        assert listener.receive(0) is None
    listener.receive(0.05)
    listener.close()


def echo(listener: Listener, count: int) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while count and time.monotonic() < end:
        if (received := listener.receive(0.05)) is not None:
            listener.send(*received)
            count -= 1
    listener.close()


def plain(message: Message) -> Message:
    return message._replace(payloads=[bytes(each) for each in message.payloads])


@pytest.mark.parametrize("payloads", [[None], [b"a", 1], [[]]])
@pytest.mark.parametrize("kind", ["push", "beat"])
def test_payloads_that_are_none_are_refused(kind: str, payloads: list[Any]) -> None:
    """A payload follows the head for each None, and only some kinds of messages have any."""
    head = head_of([msgpack.packb([kind, 1, "t", 1, 1, {}, payloads])])
    with pytest.raises(ProtocolError):
        list(with_arrays(parse(head), []))


def test_a_frame_has_no_more_messages_than_anybody_sends() -> None:
    """A member's frame of some MiB would keep a server from all others for many seconds."""
    beat = pack(Message("beat", 1))[0]
    fits = FRAME_BYTES // len(beat)
    assert len(parse(head_of([beat] * fits))) == fits
    with pytest.raises(ProtocolError, match=f"it sent {fits + 1} messages in one frame"):
        parse(head_of([beat] * (fits + 1)))


# -- when a request is sent again that has no answer yet


class Answerer:
    """Answers when it is told to."""

    sharing, takes, takes_one = None, True, False

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.answers: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)
        self.takes = self.takes and not self.takes_one

    def answer(self, connection: Connection) -> None:
        answers, self.answers = self.answers, []
        for message in answers:
            connection.take(message)


def test_a_request_is_sent_again_ever_more_rarely_until_it_is_answered() -> None:
    peer, now = Answerer(), [0.0]
    connection = Connection(cast("Caller", peer), lambda: now[0])
    request = connection.send(Message("push", table="t"))
    times = []
    while now[0] < 20.0:
        now[0] = connection.look()
        sent = len(peer.sent)
        connection.look()
        times += [now[0]] * (len(peer.sent) - sent)
    waits = [0.1, 0.2, 0.4, 0.8, 1.6, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    wanted = [sum(waits[: count + 1]) for count in range(len(waits)) if sum(waits[:count]) < 20.0]
    assert times == pytest.approx(wanted)
    assert connection.resent == len(times)
    assert {message.request for message in peer.sent} == {request}

    peer.answers += [Message("pushed", request, "t")] * 2  # Both of its sendings are answered.
    heard: list[Message] = []
    connection.receive = heard.append
    peer.answer(connection)
    now[0] += 60.0
    connection.look()
    assert (len(heard), connection.resent) == (1, len(times))


def test_what_is_under_way_is_not_sent_again_and_all_is_on_another_connection() -> None:
    peer, now = Answerer(), [0.0]
    connection = Connection(cast("Caller", peer), lambda: now[0])
    requests = [connection.send(Message("push", table="t")) for _ in range(2)]
    peer.takes = False
    for _ in range(5):
        now[0] = connection.look()
    connection.look()
    assert (len(peer.sent), connection.resent) == (2, 0)
    peer.takes = True
    peer.takes_one = True  # What is sent first is under way when the second one is looked at.
    now[0] = connection.look()
    connection.look()
    assert (len(peer.sent), connection.resent) == (4, 2)
    peer.sent[:] = peer.sent[:2]
    connection.send_again()
    assert [message.request for message in peer.sent] == requests * 2


def test_a_pull_is_not_sent_again_while_a_large_answer_may_be_on_its_way() -> None:
    """Every such request would bring all of the answer once more."""
    peer, now, large = Answerer(), [0.0], bytes(20_000_000)
    connection = Connection(cast("Caller", peer), lambda: now[0])
    first = connection.send(Message("pull", table="t"))
    now[0] = 0.2
    connection.look()
    assert [message.request for message in peer.sent] == [first] * 2  # Nothing large is known yet.
    peer.answers.append(Message("values", first, "t", payloads=[large]))
    peer.answer(connection)
    connection.send(Message("push", table="t", payloads=[large]))
    connection.send(Message("pull", table="t"))
    now[0] += 1.9
    connection.look()
    assert [message.kind for message in peer.sent] == ["pull", "pull", "push", "pull"]
    now[0] += 0.5
    connection.look()
    assert peer.sent[4:] == [peer.sent[2]]  # Of the push, 20 MB may take two seconds.
    now[0] += 2.0
    connection.look()
    assert peer.sent[-1] == peer.sent[3]  # The pull waits behind the push.


def test_nothing_is_sent_again_while_others_are_answered_but_for_some_seconds() -> None:
    """A server with much to do answers late, and would only have more to do."""
    peer, now = Answerer(), [0.0]
    connection = Connection(cast("Caller", peer), lambda: now[0])
    ignored = connection.send(Message("pull", table="t"))
    times = []
    while now[0] < 20.0:
        peer.answers.append(Message("pushed", connection.send(Message("push", table="u")), "u"))
        now[0] += 0.05
        peer.answer(connection)
        sent = len(peer.sent)
        connection.look()
        times += [now[0]] * (len(peer.sent) - sent)
    assert {message.request for message in peer.sent if message.kind == "pull"} == {ignored}
    assert times[0] == pytest.approx(0.1 + 0.2 + 0.4 + 0.8 + 1.6 + 3.0, abs=0.5)
    assert connection.resent == len(times) == 5
