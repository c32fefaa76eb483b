"""What strangers send never ends a scheduler or a server, and changes nothing for the others."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgpack
import zmq

from hvdlite.ps.connections.messages import KINDS, PROTOCOL
from tests.ps.cluster import Cluster, bits, train_in_one, trainers


def frames_of(choose: random.Random) -> list[bytes]:
    """Return frames that are random, truncated, or well formed with wrong contents."""

    def anything(depth: int = 0) -> object:
        kind = choose.randrange(8 if depth < 3 else 6)
        if kind == 6:
            return [anything(depth + 1) for _ in range(choose.randrange(4))]
        if kind == 7:
            words = ["worker", "table", "version", "nonce", "proof", "specs", "share", "change"]
            return {choose.choice(words): anything(depth + 1) for _ in range(3)}
        return [None, True, -1, 1 << 62, "x", choose.randbytes(8)][kind]

    head = [PROTOCOL, choose.choice(sorted(KINDS)), choose.randrange(9), "t", 1, 1, {}]
    if choose.random() < 0.7:
        head[choose.randrange(7)] = anything()
    else:
        head[6] = {"worker": 0, "table": anything(), "body": anything(), "source": 1, "change": 1}
    packed = msgpack.packb(head)
    if choose.random() < 0.2:
        packed = packed[: choose.randrange(len(packed))]
    return [packed, *[choose.randbytes(choose.randrange(20)) for _ in range(choose.randrange(3))]]


def test_no_message_ends_a_server_or_the_scheduler(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster(2, 1)
    (trainer,) = trainers(cluster, 1)
    trainer.train(3)
    choose, context = random.Random(7), zmq.Context()
    members = cluster.state.membership.members.values()
    addresses = [member.address.partition(" ")[0] for member in members]
    for address in [*filter(None, addresses), f"tcp://{cluster.settings.scheduler}"]:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(address)
        for _ in range(300):
            socket.send_multipart(frames_of(choose))
        socket.close()
    trainer.train(8)
    assert bits(trainer.values) == train_in_one(8, lambda _step: [0])
    assert [loop.error for loop in [*cluster.servers, cluster.scheduler]] == [None] * 3
    context.term()
