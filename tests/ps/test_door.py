"""Who has not proved the token can ask nothing, and members only what belongs to their roles."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.connections.prove import CONNECTS
from hvdlite.ps.cluster.settings import SERVER, ClusterSettings, check_token
from hvdlite.ps.connections.admission import proved, tagged
from hvdlite.ps.connections.channel import MOST_STRANGERS_BYTES
from hvdlite.ps.connections.messages import Message, pack, parse
from hvdlite.ps.server import snapshots
from tests.ps.cluster import Cluster, bits, train_in_one, trainers, wait_until

NewCluster = Callable[..., Cluster]
ANSWER_MILLISECONDS = 10_000


class Peer:
    """Somebody who can connect, and speaks the language of members."""

    def __init__(self, context: Any, address: str, name: bytes = b"") -> None:
        self.socket = context.socket(zmq.DEALER)
        if name:
            self.socket.setsockopt(zmq.IDENTITY, name)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self.key: bytes | None = None  # Since it has proved itself.

    def say(self, *words: Any) -> None:
        head, *payloads = pack(Message(*words))
        if self.key is not None:
            head = tagged(head, self.key, CONNECTS)
        self.socket.send_multipart([head, *payloads])

    def hear(self) -> Message:
        assert self.socket.poll(ANSWER_MILLISECONDS), "nobody answers"
        return parse(self.socket.recv_multipart())

    def ask(self, *words: Any) -> Message:
        self.say(*words)
        return self.hear()

    def enter(self, token: bytes, role: str = SERVER, **about: Any) -> Message:
        nonce = self.ask("hello", 1).body["nonce"]
        said, key = proved(about, nonce, token, role)
        answer = self.ask("hello", 2, "", 0, 0, said)
        self.key = key
        return answer


@contextmanager
def peer_of(address: str, name: bytes = b"") -> Iterator[Peer]:
    context = zmq.Context()
    peer = Peer(context, address.partition(" ")[0], name)
    try:
        yield peer
    finally:
        peer.socket.close()
        context.term()


def address_of(cluster: Cluster, server: int) -> str:
    return str(cluster.state.membership.members["server", server].address)


def address_of_scheduler(cluster: Cluster) -> str:
    return f"tcp://{cluster.settings.scheduler}"


@pytest.mark.parametrize("where", [lambda c: address_of(c, 0), address_of_scheduler])
def test_a_hello_that_no_member_says_ends_nobody(
    new_cluster: NewCluster, where: Callable[[Cluster], str]
) -> None:
    """JSON cannot say bytes: a hello with some must not end the process that compares its proof."""
    cluster = new_cluster(1, 1)
    (trainer,) = trainers(cluster, 1)
    with peer_of(where(cluster)) as stranger:
        nonce = stranger.ask("hello", 1).body["nonce"]
        said = {"nonce": nonce, "proof": b"x" * 32, "more": b"bytes"}
        assert stranger.ask("hello", 2, "", 0, 0, said).kind == "refused"
    trainer.train(4)
    assert bits(trainer.values) == train_in_one(4, lambda _step: [0])
    assert [cluster.servers[0].error, cluster.scheduler.error] == [None, None]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("scale", {"servers": 1}),
        ("over", {"turn": 1 << 62, "steps": {}}),
        ("barrier", {"count": 1}),
        ("declare", {}),
        ("plan", {"change": 1}),
        ("ready", {"change": 1}),
    ],
)
def test_strangers_order_the_scheduler_nothing(
    new_cluster: NewCluster, kind: str, body: dict[str, Any]
) -> None:
    cluster = new_cluster(2, 1)
    (trainer,) = trainers(cluster, 1)
    before = cluster.state._turns.loads
    with peer_of(address_of_scheduler(cluster)) as stranger:
        assert stranger.ask(kind, 1, "", 0, 0, body).kind == "restarted"
    trainer.train(2)
    assert cluster.state.registry.layout.num_servers == 2
    assert (cluster.state._wanted, cluster.state._turns.loads) == (2, before)


@pytest.mark.parametrize("where", [lambda c: address_of(c, 0), address_of_scheduler])
@pytest.mark.parametrize("parts", [1, 3])
def test_what_strangers_send_is_not_read_where_it_is_too_large(
    new_cluster: NewCluster, where: Callable[[Cluster], str], parts: int
) -> None:
    """A byte of a message may become an object of 72: only a hello has the room that it needs."""
    cluster = new_cluster(1, 1)
    trainers(cluster, 1)
    large: dict[str, Any] = {"a": [{}] * MOST_STRANGERS_BYTES} if parts == 1 else {}
    with peer_of(where(cluster)) as stranger:
        stranger.say("hello", 1, "", 0, 0, large, [b"more"] * (parts - 1))
        assert stranger.ask("hello", 2).request == 2  # What comes first is answered first.


def test_members_ask_what_belongs_to_their_roles(new_cluster: NewCluster) -> None:
    cluster = new_cluster(2, 1)
    (trainer,) = trainers(cluster, 1)
    with peer_of(address_of(cluster, 0)) as peer:
        assert peer.enter(b"a secret", server=1).kind == "welcome"
        answer = peer.ask("push", 3, "t", 0, 1, {})
        assert (answer.kind, answer.body["why"]) == (
            "failed", "a server must not ask a server for push",
        )  # fmt: skip
    with peer_of(address_of(cluster, 0)) as peer:
        assert peer.enter(b"a secret", worker=0, tables=[]).kind == "welcome"
        assert peer.ask("take", 3, "t", 0, 1, {}).kind == "failed"
    with pytest.raises(Exception, match="only a server asks for plan, and this is a worker"):
        trainer.worker.ask(Message("plan", body={"change": 1}))


@pytest.mark.parametrize("every", [1, 2])
def test_a_snapshot_that_fails_is_tried_again_and_said(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    every: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(snapshots, "LONGEST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(snapshots, "FIRST_PAUSE_SECONDS", 0.01)
    replace, failures = os.replace, iter([errno.EMFILE, errno.ENOSPC])

    def fail_twice(source: Any, target: Any) -> None:
        if str(target).endswith(snapshots.SUFFIX) and (code := next(failures, 0)):
            raise OSError(code, os.strerror(code))
        replace(source, target)

    cluster = new_cluster(1, 1, every=every)
    (trainer,) = trainers(cluster, 1)
    monkeypatch.setattr(os, "replace", fail_twice)
    trainer.train(6)
    folder = cluster.folder / "snapshots"
    wait_until(lambda: next(failures, 0) == 0 and any(folder.rglob(f"*-{6:012}.safetensors")))
    assert cluster.servers[0].error is None
    said = [record.getMessage() for record in caplog.records if "tried again" in record.message]
    assert ["Too many open files" in said[0], "No space left" in said[1]] == [True, True]


def test_a_scheduler_without_descriptors_goes_on_and_writes_later(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([errno.EMFILE] * 3)
    replace = os.replace

    def fail(source: Any, target: Any) -> None:
        if str(target).endswith("scheduler.json") and (code := next(failures, 0)):
            raise OSError(code, os.strerror(code))
        replace(source, target)

    cluster = new_cluster(1, 1)
    monkeypatch.setattr(os, "replace", fail)
    (trainer,) = trainers(cluster, 1)
    trainer.train(3)
    wait_until(lambda: '"t"' in (cluster.folder / "scheduler.json").read_text())
    assert cluster.scheduler.error is None
    assert "Too many open files; it is tried again until it can" in caplog.text


@pytest.mark.parametrize("host", ["node1", "10.0.0.1", "[fe80::1]", "0.0.0.0"])
def test_without_a_token_there_is_no_cluster_between_hosts(host: str) -> None:
    with pytest.raises(ConfigError, match=r"HVDLITE_PS_TOKEN is not set.*give all processes"):
        check_token(ClusterSettings("worker", f"{host}:4242", 1, 1))
    check_token(ClusterSettings("worker", f"{host}:4242", 1, 1, token=b"a secret"))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "[::1]"])
def test_without_a_token_there_is_a_cluster_on_one_host(host: str) -> None:
    check_token(ClusterSettings("worker", f"{host}:4242", 1, 1))
