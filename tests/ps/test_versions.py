"""Two versions of hvdlite in one cluster: they hear of each other at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import msgpack
import pytest
import zmq

from hvdlite.common.base.errors import HorovodVersionMismatchError
from hvdlite.ps.connections.messages import PROTOCOL
from hvdlite.ps.worker.worker import Worker
from tests.ps.cluster import Cluster, train_in_one, trainers
from tests.ps.cluster import bits as bits_of

NewCluster = Callable[..., Cluster]
OTHER = PROTOCOL + 1


def test_a_process_of_another_version_reads_the_protocol_in_the_answer(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(1, 1)
    (trainer,) = trainers(cluster, 1)
    context = zmq.Context()
    try:
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"tcp://{cluster.settings.scheduler}")
        stranger.send(msgpack.packb([OTHER, "what it says in that version"]))
        assert stranger.poll(20_000)
        assert msgpack.unpackb(stranger.recv_multipart()[0])[0] == PROTOCOL
        stranger.close()
    finally:
        context.term()
    trainer.train(5)
    assert bits_of(trainer.values) == train_in_one(5, lambda _step: [0])


def test_a_worker_of_another_version_than_the_scheduler_is_told(new_cluster: NewCluster) -> None:
    cluster = new_cluster(1, 1)
    trainers(cluster, 1)
    context = zmq.Context()
    scheduler = context.socket(zmq.ROUTER)
    scheduler.setsockopt(zmq.LINGER, 0)
    port = scheduler.bind_to_random_port("tcp://127.0.0.1")

    def answer() -> None:
        peer, *_ = scheduler.recv_multipart()
        scheduler.send_multipart([peer, msgpack.packb([OTHER, "refused"])])

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with pytest.raises(HorovodVersionMismatchError, match=rf"another rank runs {OTHER}: install"):
        Worker(replace(cluster.settings, node_id="a", scheduler=f"127.0.0.1:{port}"))
    thread.join(20)
    scheduler.close()
    context.term()
