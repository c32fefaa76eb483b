"""When a request is sent again that has no answer yet."""

from __future__ import annotations

from typing import cast

import pytest

from hvdlite.ps.connections.channel import Caller
from hvdlite.ps.connections.connection import Connection
from hvdlite.ps.connections.messages import Message


class Peer:
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
    peer, now = Peer(), [0.0]
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
    peer, now = Peer(), [0.0]
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
    peer, now, large = Peer(), [0.0], bytes(20_000_000)
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
    peer, now = Peer(), [0.0]
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
