"""Barriers of workers, of which one is lost, or misses the end."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hvdlite.ps.connections.messages import Message
from hvdlite.ps.worker.worker import Worker
from tests.ps.cluster import LIMIT_SECONDS, Cluster, Loop, in_threads, wait_until

NewCluster = Callable[..., Cluster]


def two_workers(cluster: Cluster) -> list[Worker]:
    return in_threads(*[lambda n=n: cluster.worker(f"worker {n}", n) for n in range(2)])


def test_a_successor_has_to_come_to_the_barrier_itself(new_cluster: NewCluster) -> None:
    cluster = new_cluster(1, 2)
    first, second = two_workers(cluster)
    waiting = Loop(lambda _ended: first.barrier())
    wait_until(lambda: bool(cluster.state.barrier.waiting))
    first.close()
    waiting.wait()
    assert "its connections are closed" in str(waiting.error)
    successor = cluster.worker("worker 0", 0)
    waiter = threading.Thread(target=second.barrier, daemon=True)
    waiter.start()
    wait_until(lambda: 1 in cluster.state.barrier.waiting)
    assert waiter.is_alive()
    successor.barrier()
    waiter.join(LIMIT_SECONDS)
    assert not waiter.is_alive()


def test_a_worker_that_missed_the_end_is_not_one_barrier_behind(new_cluster: NewCluster) -> None:
    """The scheduler dies with its answer to one worker; the other one has gone on."""
    cluster = new_cluster(1, 2)
    first, second = two_workers(cluster)
    listener = cluster.state.listener
    send, numbers = listener.send, cluster.state.membership

    def lose(peer: bytes, message: Message) -> None:
        member = numbers.member_of(peer)
        if message.kind != "done" or member is None or member.number != second.number:
            send(peer, message)

    listener.send = lose  # type: ignore[method-assign]
    late = threading.Thread(target=second.barrier, daemon=True)
    late.start()
    first.barrier()
    cluster.scheduler.end()
    cluster.start_scheduler()
    late.join(LIMIT_SECONDS)
    assert not late.is_alive()
    assert not cluster.state.barrier.waiting
    in_threads(first.barrier, second.barrier)
