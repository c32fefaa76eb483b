"""Who has not proved the token can ask nothing, and members only what belongs to their roles.

Both ends prove themselves: nobody answers for a scheduler or a server, either.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from hvdlite.common.base.errors import ConfigError, HorovodInternalError
from hvdlite.common.connections import prove
from hvdlite.common.connections.frames import PREFIX, frame
from hvdlite.common.connections.prove import Challenge
from hvdlite.ps.cluster.settings import ClusterSettings, check_token
from hvdlite.ps.connections import system
from hvdlite.ps.connections.client import Client
from hvdlite.ps.connections.messages import (
    MOST_HEAD_BYTES,
    SCHEDULER,
    SERVER,
    WORKER,
    Message,
    head_of,
    pack,
)
from hvdlite.ps.server import snapshots
from hvdlite.ps.worker import worker
from hvdlite.ps.worker.server_link import ServerLink
from hvdlite.ps.worker.worker import Worker
from tests.ps.cluster import Cluster, NewCluster, bits, train_in_one, trainers, wait_until, with_one
from tests.ps.hostile import begin, claim_with
from tests.ps.peers import TOKEN, Peer

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
    cluster, trainer = with_one(new_cluster, 2)
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
    cluster, trainer = with_one(new_cluster, 1)
    with peer_of(cluster, where(cluster)) as peer:
        peer.say_raw(begins)
        peer.wait(lambda: bool(peer.caller.trouble))
        assert peer.ask("beat", 2).request == 2  # It may come again.
    trainer.train(4)
    assert bits(trainer.values) == train_in_one(4, lambda _step: [0])


def test_members_ask_what_belongs_to_their_roles(new_cluster: NewCluster) -> None:
    cluster, trainer = with_one(new_cluster, 2)
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

    cluster, trainer = with_one(new_cluster, 1, every=every)
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


# -- proofs


LIMIT_SECONDS = 20.0


class Rogue:
    """Who answers at the address of a scheduler or a server, and does not know the token.

    It takes each claim, gives a proof of its own, and notes what comes then.
    """

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.heard: list[bytes] = []  # After each claim.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # It is closed.
                return
            with contextlib.suppress(OSError), connection:
                connection.settimeout(LIMIT_SECONDS)
                challenge = Challenge.new()
                connection.sendall(challenge.pack())
                data = connection.recv(prove.PROVEN_CLAIM_BYTES, socket.MSG_WAITALL)
                if len(data) == prove.PROVEN_CLAIM_BYTES:
                    claim = prove.Claim.unpack(data[: prove.CLAIM.size])
                    connection.sendall(prove.acceptance(b"a guess", challenge, claim))
                    self.heard.append(connection.recv(1000))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # It was closed before.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(LIMIT_SECONDS)


@pytest.fixture
def rogue() -> Iterator[Rogue]:
    made = Rogue()
    yield made
    made.close()


def test_who_finds_another_program_at_the_port_of_the_scheduler_is_told() -> None:
    """It takes connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        strayed = ClusterSettings(
            WORKER, where, 1, 1, token=TOKEN, independent=True, start_seconds=0.1
        )
        with (
            patch.object(worker, "ANSWER_SECONDS", 0.1),
            pytest.raises(HorovodInternalError, match=r"nobody there has proved.*have its port"),
        ):
            Worker(strayed)


def test_nothing_goes_to_a_scheduler_that_proves_nothing(rogue: Rogue) -> None:
    """It could name servers of its own otherwise, which get gradients and give weights."""
    strayed = ClusterSettings(WORKER, rogue.address, 1, 1, token=TOKEN, independent=True)
    with pytest.raises(ConfigError, match="the scheduler says: HVDLITE_PS_TOKEN is another one"):
        Worker(strayed)
    rogue.close()
    assert set(rogue.heard) == {b""}


def test_nothing_goes_to_a_server_that_proves_nothing(rogue: Rogue) -> None:
    client = Client(b"worker 0", TOKEN)
    link = ServerLink(client, 0, lambda: 0)
    client.call(lambda: link.follow(rogue.address))
    handle = client.ask(lambda done: link.ask(Message("save"), done))
    try:
        assert handle.ended_within(LIMIT_SECONDS)
        with pytest.raises(ConfigError, match="server 0 says: HVDLITE_PS_TOKEN is another one"):
            handle.wait()
    finally:
        client.close()
    rogue.close()
    assert set(rogue.heard) == {b""}


def reply(connection: socket.socket) -> int:
    """Return the code with which a claim is answered."""
    data = connection.recv(prove.REPLY.size, socket.MSG_WAITALL)
    return int(prove.REPLY.unpack(data)[0])


def test_a_proof_for_the_scheduler_opens_no_server(new_cluster: NewCluster) -> None:
    """As one who stands between them could try."""
    cluster, _ = with_one(new_cluster, 1)
    for role, code in (("ps scheduler", prove.OTHER_ROLE), ("ps server", prove.ACCEPTED)):
        with begin(address_of(cluster, 0)) as relay:
            relay.sendall(claim_with(relay, TOKEN, role, b"worker 9"))
            assert reply(relay) == code


def test_a_proof_is_for_one_connection(new_cluster: NewCluster) -> None:
    cluster, _ = with_one(new_cluster, 1)
    address = address_of_scheduler(cluster)
    with begin(address) as first, begin(address) as second:
        claim = claim_with(first, TOKEN, "ps scheduler", b"worker 9")
        for connection, code in ((second, prove.OTHER_SECRET), (first, prove.ACCEPTED)):
            connection.sendall(claim)
            if connection is second:
                connection.recv(prove.CHALLENGE.size, socket.MSG_WAITALL)
            assert reply(connection) == code


def test_who_knows_the_name_of_a_member_orders_the_scheduler_nothing(
    new_cluster: NewCluster,
) -> None:
    cluster, trainer = with_one(new_cluster, 2, 3)
    name = trainer.worker._client._identity
    with begin(address_of_scheduler(cluster)) as stranger:
        stranger.sendall(claim_with(stranger, b"a guess", "ps scheduler", name))
        assert reply(stranger) == prove.OTHER_SECRET
    trainer.train(8)
    assert bits(trainer.values) == train_in_one(8, lambda _step: [0])
    assert cluster.state.changes.wanted == cluster.state.registry.layout.num_servers == 2
    assert [loop.error for loop in [*cluster.servers, cluster.scheduler]] == [None] * 3


def test_a_name_belongs_to_the_connection_that_has_proved_it_last(new_cluster: NewCluster) -> None:
    cluster, _ = with_one(new_cluster, 1)
    address = address_of(cluster, 0)
    with peer_of(cluster, address) as first, peer_of(cluster, address) as second:
        assert first.ask("beat", 1).kind == "beat"
        assert second.ask("beat", 1).kind == "beat"
        first.wait(lambda: bool(first.caller.trouble))
        assert first.caller.trouble == "it has closed the connection"


def test_a_worker_is_known_by_the_process_that_has_said_hello_last(new_cluster: NewCluster) -> None:
    cluster, _ = with_one(new_cluster, 1)
    hello = {"worker": 7, "tables": []}
    address = address_of(cluster, 0)
    with (
        peer_of(cluster, address, b"worker 7 before") as first,
        peer_of(cluster, address, b"worker 7 after") as second,
    ):
        for known in (False, True):
            answer = first.ask("hello", 1, "", 0, 0, hello)
            assert (answer.kind, answer.body["is_known"]) == ("welcome", known)
        assert not second.ask("hello", 1, "", 0, 0, hello).body["is_known"]
        first.wait(lambda: bool(first.caller.trouble))
        answer = first.ask("hello", 2, "", 0, 0, hello)
        assert answer.kind == "failed"
        assert "worker 7" in answer.body["why"]


@pytest.mark.parametrize("role", [SCHEDULER, SERVER])
def test_who_guesses_is_refused(new_cluster: NewCluster, role: str) -> None:
    cluster, _ = with_one(new_cluster, 1)
    address = address_of(cluster, 0) if role == SERVER else address_of_scheduler(cluster)
    stranger = Peer(address, role, token=b"a guess")
    stranger.wait(lambda: bool(stranger.refused))
    assert not stranger.caller.takes
    stranger.close()
