"""Two versions of hvdlite in one cluster: they hear of each other at once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from hvdlite.common.base.errors import HorovodVersionMismatchError
from hvdlite.common.connections import prove
from hvdlite.common.connections.prove import Challenge, Claim, Party, Software
from hvdlite.common.requests.messages import PROTOCOL_VERSION
from hvdlite.ps.connections import client
from hvdlite.ps.connections.channel import MEMBER, Caller
from hvdlite.ps.connections.connection import Connection
from hvdlite.ps.worker.worker import Worker
from tests.ps.cluster import Cluster, train_in_one, trainers, wait_until
from tests.ps.cluster import bits as bits_of
from tests.ps.hostile import begin

NewCluster = Callable[..., Cluster]
OTHER = Software(PROTOCOL_VERSION + 1, "9.9")
SAYS = r"another rank runs 9\.9 \(protocol|9\.9 \(protocol .* is installed here"


@contextmanager
def other_version() -> Iterator[str]:
    """Yield the address of a process of another version, which refuses one claim."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(20)

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(Challenge(OTHER, prove.new_nonce()).pack())
                connection.recv(prove.PROVEN_CLAIM_BYTES, socket.MSG_WAITALL)
                connection.sendall(prove.refusal(prove.OTHER_PROTOCOL, "it is another version"))
                connection.settimeout(20)
                connection.recv(1)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join(20)


def test_a_process_of_another_version_reads_ours_and_is_refused(new_cluster: NewCluster) -> None:
    cluster = new_cluster(1, 1)
    (trainer,) = trainers(cluster, 1)
    with begin(cluster.settings.scheduler) as stranger:
        data = stranger.recv(prove.CHALLENGE.size, socket.MSG_WAITALL)
        challenge = Challenge.unpack(data)
        assert challenge.software == prove.OURS
        claim = Claim.new(Party(b"", MEMBER, "ps scheduler"), b"worker 9")
        stranger.sendall(prove.prove_claim(b"a secret", challenge, claim._replace(software=OTHER)))
        code, length = prove.REPLY.unpack(stranger.recv(prove.REPLY.size, socket.MSG_WAITALL))
        assert code == prove.OTHER_PROTOCOL
        assert b"runs hvdlite 9.9" in stranger.recv(length, socket.MSG_WAITALL)
    trainer.train(5)
    assert bits_of(trainer.values) == train_in_one(5, lambda _step: [0])


def test_a_worker_of_another_version_than_the_scheduler_is_told(new_cluster: NewCluster) -> None:
    cluster = new_cluster(1, 1)
    trainers(cluster, 1)
    with (
        other_version() as address,
        pytest.raises(HorovodVersionMismatchError, match=SAYS),
    ):
        Worker(replace(cluster.settings, node_id="a", scheduler=address))


def test_a_refusal_is_heard_however_soon_it_comes(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come before the thread that connects goes on."""

    class Late(Connection):
        def __init__(self, caller: Caller, now: Callable[[], float]) -> None:
            wait_until(lambda: bool(caller.trouble))
            super().__init__(caller, now)

    cluster = new_cluster(1, 1)
    trainers(cluster, 1)
    monkeypatch.setattr(client, "Connection", Late)
    with other_version() as address, pytest.raises(HorovodVersionMismatchError, match=SAYS):
        Worker(replace(cluster.settings, node_id="a", scheduler=address, start_seconds=0.5))
