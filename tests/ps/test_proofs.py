"""Both ends prove themselves: nobody answers for a scheduler or a server, or asks as a member."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.connections.prove import CONNECTS, LISTENS
from hvdlite.ps.cluster.settings import SCHEDULER, SERVER, WORKER, ClusterSettings
from hvdlite.ps.connections.admission import Admission, proved, tagged
from hvdlite.ps.connections.channel import STRANGERS_SAY, Caller, Listener, new_context
from hvdlite.ps.connections.client import Client
from hvdlite.ps.connections.messages import KINDS, Message, pack, parse
from hvdlite.ps.worker import worker as worker_module
from hvdlite.ps.worker.server_link import ServerLink
from hvdlite.ps.worker.worker import Worker
from tests.ps.cluster import Cluster, bits, train_in_one, trainers, wait_until
from tests.ps.test_door import address_of, address_of_scheduler, peer_of

NewCluster = Callable[..., Cluster]
LIMIT_SECONDS = 20.0
TOKEN, KEY = b"a secret", b"k" * 32
few = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class Rogue:
    """Who answers at the address of a scheduler or a server, and does not know the token.

    `answers(message)` returns kinds and bodies. `heard` has what has come.
    """

    def __init__(self, answers: Callable[[Message], list[tuple[str, dict[str, Any]]]]) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._answers = answers
        self.heard: list[Message] = []
        self.asked_again = threading.Event()  # What was answered has come again.
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        answered: set[tuple[str, int]] = set()
        while not self._ended.is_set():
            if not self._socket.poll(20):
                continue
            peer, *frames = self._socket.recv_multipart()
            message = parse(frames)
            self.heard.append(message)
            if message.kind != "hello" and (message.kind, message.request) in answered:
                self.asked_again.set()
            answered.add((message.kind, message.request))
            for kind, body in self._answers(message):
                head = pack(Message(kind, message.request, message.table, 1, 1, body))[0]
                self._socket.send_multipart([peer, head])
                self._socket.send_multipart([peer, tagged(head, KEY, LISTENS)])

    def close(self) -> None:
        self._ended.set()
        self._thread.join(LIMIT_SECONDS)
        self._socket.close()
        self._context.term()


@pytest.fixture
def new_rogue() -> Iterator[Callable[..., Rogue]]:
    made: list[Rogue] = []

    def new(*words: Any) -> Rogue:
        made.append(Rogue(*words))
        return made[-1]

    yield new
    for rogue in made:
        rogue.close()


@pytest.mark.parametrize("challenges", [False, True])
def test_nothing_but_a_hello_goes_to_a_scheduler_that_proves_nothing(
    new_rogue: Callable[..., Rogue], monkeypatch: pytest.MonkeyPatch, challenges: bool
) -> None:
    """It could name servers of its own otherwise, which get gradients and give weights."""
    about = {
        "number": 0, "incarnation": 1, "servers": [[0, "tcp://127.0.0.1:9", 1]], "workers": [0],
        "failure": "", "job": "x", "layout": 1, "layout_servers": 1, "change": None,
    }  # fmt: skip

    def answers(message: Message) -> list[tuple[str, dict[str, Any]]]:
        if challenges and "proof" not in message.body:
            return [("challenge", {"nonce": os.urandom(16)})]
        return [("welcome", about), ("beat", about)]

    rogue = new_rogue(answers)
    monkeypatch.setattr(worker_module, "ANSWER_SECONDS", 0.0)
    strayed = ClusterSettings(
        WORKER, f"127.0.0.1:{rogue.port}", 1, 1, token=TOKEN, independent=True, start_seconds=0.5
    )
    with pytest.raises(HorovodInternalError, match="has not let this worker in"):
        Worker(strayed)
    assert {message.kind for message in rogue.heard} <= {"hello"}


def test_answers_of_a_server_that_proves_nothing_are_none(
    new_rogue: Callable[..., Rogue],
) -> None:
    def answers(message: Message) -> list[tuple[str, dict[str, Any]]]:
        if message.kind == "hello" and "proof" not in message.body:
            return [("challenge", {"nonce": os.urandom(16)})]
        return [("welcome", {}), ("saved", {}), ("beat", {})]

    rogue = new_rogue(answers)
    client = Client(b"worker 0")
    link = ServerLink(client, 0, lambda: 0, TOKEN)
    client.call(lambda: link.follow(f"tcp://127.0.0.1:{rogue.port}"))
    handle = client.ask(lambda done: link.ask(Message("save"), done))
    try:
        assert rogue.asked_again.wait(LIMIT_SECONDS)
        assert link._connection is not None
        caller = link._connection.caller
        wait_until(lambda: caller.heard_unproved)
        assert not handle.poll()
    finally:
        client.close()


words = st.one_of(st.none(), st.integers(0, 9), st.binary(max_size=20), st.text(max_size=5))
said = st.tuples(
    st.sampled_from(sorted(KINDS)),
    st.dictionaries(st.sampled_from(["nonce", "proof", "own", "why", "number"]), words),
    st.sampled_from(["no tag", "another key", "the other end", "right"]),
)


def tagged_as(how: str, head: bytes, end: bytes) -> bytes:
    other = CONNECTS if end == LISTENS else LISTENS
    tags = {
        "no tag": head, "another key": tagged(head, b"x" * 32, end),
        "the other end": tagged(head, KEY, other), "right": tagged(head, KEY, end),
    }  # fmt: skip
    return tags[how]


class Pair:
    """A listener and a caller that have proved themselves, and raw sockets in their places."""

    def __init__(self) -> None:
        self._context = new_context()
        self.listener = Listener(self._context, "tcp://127.0.0.1:*")
        self.listener.asks_for_proof = True
        self.listener.let_in(b"a member", KEY)
        self.asks = self._context.socket(zmq.DEALER)
        self.asks.setsockopt(zmq.IDENTITY, b"a member")
        self.asks.connect(self.listener.address)
        self.answers = self._context.socket(zmq.ROUTER)
        port = self.answers.bind_to_random_port("tcp://127.0.0.1")
        self.caller = Caller(self._context, f"tcp://127.0.0.1:{port}", b"a member")
        self.caller.asks_for_proof, self.caller.key = True, KEY
        self.caller.send(Message("beat"))
        self.peer = self.answers.recv_multipart()[0]

    def close(self) -> None:
        for socket in (self.asks, self.answers):
            socket.close(0)
        self.caller.close()
        self.listener.close()
        self._context.term()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


LAST = Message("beat", 1 << 20)  # Behind all that is said, so that nothing is waited for in vain.


@few
@given(st.lists(said, max_size=12))
def test_in_the_name_of_a_member_others_say_hello_and_nothing_else(
    pair: Pair, sequence: list[tuple[str, dict[str, Any], str]]
) -> None:
    for number, (kind, body, how) in enumerate(sequence, 1):
        head = pack(Message(kind, number, body=body))[0]
        pair.asks.send(tagged_as(how, bytes(head), CONNECTS))
    pair.asks.send(tagged(pack(LAST)[0], KEY, CONNECTS))
    heard: list[Message] = []
    while not heard or heard[-1] != LAST:
        received = pair.listener.receive(LIMIT_SECONDS)
        if received is not None:
            heard.append(received[1])
    expected = [
        (number, kind)
        for number, (kind, _, how) in enumerate(sequence, 1)
        if how == "right" or kind == "hello"
    ]
    assert [(each.request, each.kind) for each in heard[:-1]] == expected


@few
@given(st.lists(said, max_size=12))
def test_an_end_that_listens_is_believed_nothing_before_its_proof(
    pair: Pair, sequence: list[tuple[str, dict[str, Any], str]]
) -> None:
    for number, (kind, body, how) in enumerate(sequence, 1):
        head = pack(Message(kind, number, body=body))[0]
        pair.answers.send_multipart([pair.peer, tagged_as(how, bytes(head), LISTENS)])
    pair.answers.send_multipart([pair.peer, tagged(pack(LAST)[0], KEY, LISTENS)])
    heard: list[Message] = []
    while not heard or heard[-1] != LAST:
        assert pair.caller.socket.poll(round(LIMIT_SECONDS * 1000))
        heard += pair.caller.received()
    expected = [
        (number, kind)
        for number, (kind, _, how) in enumerate(sequence, 1)
        if how == "right" or kind in STRANGERS_SAY
    ]
    assert [(each.request, each.kind) for each in heard[:-1]] == expected


def test_a_proof_is_for_one_role_and_one_nonce() -> None:
    scheduler, server = Admission(TOKEN, SCHEDULER), Admission(TOKEN, SERVER)
    said, key = proved({"worker": 0}, scheduler.nonce_for(b"p"), TOKEN, SCHEDULER)
    server._nonces[b"p"] = scheduler.nonce_for(b"p")  # As one who stands between them could do.
    assert server.admit(b"p", said) is None
    assert scheduler.admit(b"p", said) == key
    scheduler.nonce_for(b"p")
    assert scheduler.admit(b"p", said) is None


def test_who_knows_the_name_of_a_member_orders_the_scheduler_nothing(
    new_cluster: NewCluster,
) -> None:
    """ZeroMQ hands a name over to whoever connects with it last."""
    cluster = new_cluster(2, 1)
    (trainer,) = trainers(cluster, 1)
    trainer.train(3)
    name = trainer.worker._client._identity
    with peer_of(address_of_scheduler(cluster), name) as stranger:
        for number, (kind, body) in enumerate(
            [("leave", {}), ("scale", {"servers": 1}), ("over", {"turn": 1, "steps": {}})], 1
        ):
            stranger.say(kind, number, "", 0, 1, body)
        assert stranger.ask("hello", 9).request == 9
    trainer.train(8)
    assert bits(trainer.values) == train_in_one(8, lambda _step: [0])
    assert cluster.state._wanted == cluster.state.registry.layout.num_servers == 2
    assert [loop.error for loop in [*cluster.servers, cluster.scheduler]] == [None] * 3


def test_a_member_is_known_by_the_connection_that_has_proved_it_last(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(1, 1)
    trainers(cluster, 1)
    with peer_of(address_of(cluster, 0)) as first, peer_of(address_of(cluster, 0)) as second:
        assert first.enter(TOKEN, worker=7, tables=[]).kind == "welcome"
        assert first.ask("beat", 3).kind == "beat"
        assert second.enter(TOKEN, worker=7, tables=[]).kind == "welcome"
        assert first.ask("beat", 4).kind == "challenge"
        assert second.ask("beat", 3).kind == "beat"


def test_a_proof_for_the_scheduler_opens_no_server(new_cluster: NewCluster) -> None:
    cluster = new_cluster(1, 1)
    trainers(cluster, 1)
    with peer_of(address_of(cluster, 0)) as peer:
        assert peer.enter(TOKEN, SCHEDULER, worker=7, tables=[]).kind == "refused"
