"""Who has not proved the token can ask nothing, and members only what belongs to their roles."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.connections.frames import PREFIX, frame
from hvdlite.ps.cluster.settings import ClusterSettings, check_token
from hvdlite.ps.connections import system
from hvdlite.ps.connections.messages import (
    MOST_HEAD_BYTES,
    SCHEDULER,
    SERVER,
    Message,
    head_of,
    pack,
)
from hvdlite.ps.server import snapshots
from tests.ps.cluster import Cluster, bits, train_in_one, trainers, wait_until
from tests.ps.peers import Peer

NewCluster = Callable[..., Cluster]
PUSH = head_of([pack(Message("push", 1, "t", payloads=[bytes(1 << 20)]))[0]])


@contextmanager
def peer_of(cluster: Cluster, address: str, name: bytes = b"worker of a test") -> Iterator[Peer]:
    role = SCHEDULER if address == address_of_scheduler(cluster) else SERVER
    peer = Peer(address, role, name)
    try:
        yield peer
    finally:
        peer.close()


def address_of(cluster: Cluster, server: int) -> str:
    return str(cluster.state.membership.members["server", server].address)


def address_of_scheduler(cluster: Cluster) -> str:
    return cluster.settings.scheduler


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
def test_who_has_not_enrolled_orders_the_scheduler_nothing(
    new_cluster: NewCluster, kind: str, body: dict[str, Any]
) -> None:
    cluster = new_cluster(2, 1)
    (trainer,) = trainers(cluster, 1)
    before = cluster.state.turns.loads
    with peer_of(cluster, address_of_scheduler(cluster)) as stranger:
        assert stranger.ask(kind, 1, "", 0, 0, body).kind == "restarted"
    trainer.train(2)
    assert cluster.state.registry.layout.num_servers == 2
    assert (cluster.state.changes.wanted, cluster.state.turns.loads) == (2, before)


@pytest.mark.parametrize("where", [lambda c: address_of(c, 0), address_of_scheduler])
@pytest.mark.parametrize(
    "begins",
    [
        PREFIX.pack(MOST_HEAD_BYTES + 1, 0),
        PREFIX.pack(8, 1 << 20),
        PREFIX.pack(1 << 16, 0) + b"\xdd\0\1\0\0" + b"\x80" * (1 << 16),
        frame(head_of([pack(Message("beat", 1))[0]]), [b"what a beat has not"]),
        PREFIX.pack(len(PUSH), 1) + struct.pack("<Q", 1 << 62) + PUSH,
    ],
    ids=["a large head", "many arrays", "no head", "an array too much", "a large array"],
)
def test_a_member_says_what_has_bounds_or_loses_its_connection(
    new_cluster: NewCluster, where: Callable[[Cluster], str], begins: bytes
) -> None:
    cluster = new_cluster(1, 1)
    (trainer,) = trainers(cluster, 1)
    with peer_of(cluster, where(cluster)) as peer:
        peer.say_raw(begins)
        peer.wait(lambda: bool(peer.caller.trouble))
        assert peer.ask("beat", 2).request == 2  # It may come again.
    trainer.train(4)
    assert bits(trainer.values) == train_in_one(4, lambda _step: [0])


def test_members_ask_what_belongs_to_their_roles(new_cluster: NewCluster) -> None:
    cluster = new_cluster(2, 1)
    (trainer,) = trainers(cluster, 1)
    with peer_of(cluster, address_of(cluster, 0), b"server 1") as peer:
        answer = peer.ask("push", 3, "t", 0, 1, {})
        assert (answer.kind, answer.body["why"]) == (
            "failed", "a server must not ask a server for push",
        )  # fmt: skip
    with peer_of(cluster, address_of(cluster, 0)) as peer:
        answer = peer.ask("take", 3, "t", 0, 1, {})
        assert (answer.kind, answer.body["why"]) == (
            "failed", "a worker must not ask a server for take",
        )  # fmt: skip
    with peer_of(cluster, address_of_scheduler(cluster), b"server 1") as peer:
        hello = {"role": "worker", "node_id": "x", "num_servers": 2, "num_workers": 1}
        assert (
            "a server says that it is a worker" in peer.ask("hello", 3, "", 0, 0, hello).body["why"]
        )
    with pytest.raises(Exception, match="only a server asks for plan, and this is a worker"):
        trainer.worker.ask(Message("plan", body={"change": 1}))


@pytest.mark.parametrize("every", [1, 2])
def test_a_snapshot_that_fails_is_tried_again_and_said(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    every: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(snapshots, "LONGEST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(snapshots, "FIRST_PAUSE_SECONDS", 0.01)
    replace, failures = system.replace, iter([errno.EMFILE, errno.ENOSPC])

    def fail_twice(source: Any, target: Any) -> None:
        if str(target).endswith(snapshots.SUFFIX) and (code := next(failures, 0)):
            raise OSError(code, os.strerror(code))
        replace(source, target)

    cluster = new_cluster(1, 1, every=every)
    (trainer,) = trainers(cluster, 1)
    monkeypatch.setattr(system, "replace", fail_twice)
    trainer.train(6)
    folder = cluster.folder / "snapshots"
    # Which versions are written depends on when the writer fails: one of the last two is.
    wait_until(lambda: any(int(path.stem[-12:]) >= 5 for path in folder.rglob("*.safetensors")))
    assert cluster.servers[0].error is None
    said = [record.getMessage() for record in caplog.records if "tried again" in record.message]
    assert ["Too many open files" in said[0], "No space left" in said[1]] == [True, True]


def test_a_scheduler_without_descriptors_goes_on_and_writes_later(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([errno.EMFILE] * 3)
    replace = system.replace

    def fail(source: Any, target: Any) -> None:
        if str(target).endswith("scheduler.json") and (code := next(failures, 0)):
            raise OSError(code, os.strerror(code))
        replace(source, target)

    cluster = new_cluster(1, 1)
    monkeypatch.setattr(system, "replace", fail)
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
