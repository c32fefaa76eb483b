"""Whoever waits hears of an end, whoever else does or does not take part."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.ps.connections.messages import Message
from hvdlite.ps.layouts.blocks import Array
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.clocks import ASYNC, SYNC
from hvdlite.ps.tables.updater import Added
from hvdlite.ps.worker.remote_table import RemoteTable
from hvdlite.ps.worker.shard import PsRolledBack, Shard
from hvdlite.ps.worker.worker import Worker
from tests.ps.cluster import (
    LIMIT_SECONDS,
    SIZES,
    SPECS,
    Cluster,
    Loop,
    NewCluster,
    in_threads,
    wait_until,
    with_one,
)


def workers(cluster: Cluster, count: int) -> list[Worker]:
    return in_threads(*[lambda n=n: cluster.worker(f"worker {n}", n) for n in range(count)])


def declared(worker: Worker, name: str) -> RemoteTable:
    options = TableOptions(ASYNC, None, part_bytes=800)
    return worker.declare(name, SPECS, options, lambda: [np.zeros(size) for size in SIZES])


def pushed_and_pulled(table: RemoteTable) -> float:
    values = [np.zeros(size) for size in SIZES]
    table.push([np.ones(size) for size in SIZES], {})
    table.pull(values)
    return float(values[0][0])


@pytest.mark.parametrize("word", ["push", "pull"])
def test_a_request_that_another_one_displaces_fails(word: str) -> None:
    """Two threads that use one table at the same time: none of them may wait for ever."""
    shard = Shard("t", 0, 3, {}, list, lambda _message: 1)
    ends: list[Message | Exception] = []
    others: list[Message | Exception] = []
    for done in (ends.append, others.append):
        if word == "push":
            shard.push({}, [], done)
        else:
            shard.pull(done)
    assert [str(error) for error in ends] == [
        f"worker 3 has begun another {word} of the table 't' before this one was answered: let one "
        "thread at a time use an optimizer"
    ]
    assert not others


def started_shard(sent: list[Message]) -> Shard:
    """A shard in which the worker takes part; the ids of what it sends are 1, 2, 3 ..."""

    def send(message: Message) -> int:
        sent.append(message)
        return len(sent)

    shard = Shard("t", 0, 3, {}, list, send)
    shard.start(lambda _answer: None)
    shard.receive(Message("started", 1, "t", body={"clock": 0, "of": 3}))
    return shard


def test_a_late_answer_to_a_push_does_not_end_the_next_one() -> None:
    """Values that came before it have told already that the first push is there."""
    sent: list[Message] = []
    shard, ends = started_shard(sent), []
    shard.push({}, [], lambda _answer: ends.append("first"))
    shard.pull(lambda _answer: ends.append("pull"))
    shard.receive(Message("values", 3, "t", 1))
    shard.push({}, [], lambda _answer: ends.append("second"))
    shard.receive(Message("pushed", 2, "t", 1))
    assert ends == ["first", "pull"]
    shard.receive(Message("pushed", 4, "t", 2))
    assert ends == ["first", "pull", "second"]


def begin_push(shard: Shard, ends: list[object], name: str) -> None:
    shard.operations.push(partial(shard.push, {}, []), lambda _answer: ends.append(name))


def test_values_that_nobody_awaits_any_more_end_no_push() -> None:
    """A worker that leaves drops its pulls; a push behind them may be under way by then."""
    sent: list[Message] = []
    shard, ends = started_shard(sent), []
    begin_push(shard, ends, "first")
    shard.operations.pull(shard.pull, lambda _error: ends.append("pull"))
    begin_push(shard, ends, "second")
    begin_push(shard, ends, "third")
    shard.drop_pulls(HorovodInternalError("this worker leaves"))
    shard.receive(Message("pushed", 2, "t", 1))
    shard.receive(Message("values", 3, "t", 1))
    assert ends == ["pull", "first"] and [each.kind for each in sent[3:]] == ["push"]
    shard.receive(Message("pushed", 4, "t", 2))
    shard.receive(Message("pushed", 5, "t", 3))
    assert ends == ["pull", "first", "second", "third"]


def test_a_push_that_is_refused_ends_none_behind_it() -> None:
    """What waits for its turn begins as soon as the push before it has ended."""
    shard, ends = started_shard([]), []
    begin_push(shard, ends, "first")
    begin_push(shard, ends, "second")
    shard.operations.pull(shard.pull, ends.append)
    shard.receive(Message("failed", 2, "t", body={"why": "it does not fit"}))
    assert ends == ["first"]
    shard.receive(Message("pushed", 3, "t", 1))
    values = Message("values", 4, "t", 1)
    shard.receive(values)
    assert ends == ["first", "second", values]


def test_the_answer_to_a_pull_that_a_rollback_has_failed_ends_no_push() -> None:
    """The pull begins as the push before it fails, and fails in the same moment."""
    sent: list[Message] = []
    shard, ends = started_shard(sent), []
    shard.push({}, [], lambda _answer: None)
    shard.receive(Message("pushed", 2, "t", 1))
    begin_push(shard, ends, "lost")
    error = PsRolledBack("a server has lost steps", 0)
    shard.operations.push(lambda done: done(error), lambda _error: ends.append("lost, too"))
    shard.operations.pull(shard.pull, lambda _error: ends.append("pull"))
    shard.come_again()
    shard.receive(Message("rolled_back", 4, "t", 0, body={"clock": 0}))
    begin_push(shard, ends, "again")
    assert ends == ["lost", "lost, too", "pull"]
    assert [each.kind for each in sent[4:]] == ["pull", "push"]
    shard.receive(Message("values", 5, "t", 0))
    assert "again" not in ends
    shard.receive(Message("pushed", 6, "t", 1))
    assert ends[-1] == "again"


@pytest.mark.parametrize("told", [1, 0])
def test_a_push_that_was_not_answered_counts_where_the_next_servers_have_it(told: int) -> None:
    """One of a worker that was silent while they changed may be on none of them."""
    sent: list[Message] = []
    old, ends = started_shard([]), []
    old.push({}, [b"gradients"], ends.append)
    new = Shard("t", 0, 3, {}, list, lambda message: sent.append(message) or len(sent))
    new.take_over(old, old.known_clock, 0, 0, [b"values"])
    new.confirm(old.retire())
    new.pull(ends.append)
    new.come_again()
    assert not ends and sent[0].body["clock"] == 0
    new.receive(Message("started", 1, "t", 5, body={"clock": told}))
    if told == 1:
        assert [end.kind for end in ends] == ["pushed"]
        assert [message.kind for message in sent] == ["start", "pull"]
    else:
        assert len(ends) == 2
        for error in ends:
            assert isinstance(error, HorovodInternalError)
            assert "worker 3 was silent" in str(error) and "its push of step 0" in str(error)


def test_a_pull_behind_a_push_that_is_refused_fails_too() -> None:
    """The server answers no pull before it has the pushes that the worker counts."""
    sent: list[Message] = []
    shard, ends = started_shard(sent), []
    shard.push({}, [], ends.append)
    shard.pull(ends.append)
    shard.receive(Message("failed", 2, "t", body={"why": "it does not fit"}))
    assert [str(error) for error in ends] == ["server 0, table 't': it does not fit"] * 2


@pytest.mark.parametrize("word", ["barrier", "declare"])
def test_what_is_asked_of_a_scheduler_that_has_ended_with_the_job_fails(
    new_cluster: NewCluster, word: str
) -> None:
    cluster, trainer = with_one(new_cluster, 1, server_seconds=0.3)
    cluster.servers[0].end()
    wait_until(lambda: bool(trainer.worker.failure))
    cluster.scheduler.end()

    def asks() -> None:
        with pytest.raises(HorovodInternalError, match=r"server 0 .* is lost"):
            if word == "barrier":
                trainer.worker.barrier()
            else:
                declared(trainer.worker, "another")

    in_threads(asks)


def test_a_table_of_one_worker_alone_begins_though_servers_have_waited_for_workers(
    new_cluster: NewCluster,
) -> None:
    """A server whose workers come late says its hello again, and is the same server."""
    cluster = new_cluster(1, 2, updater=Added)
    heard = cluster.state.membership.members["server", 0].heard
    wait_until(lambda: cluster.state.membership.members["server", 0].heard > heard)
    first, _ = workers(cluster, 2)
    assert in_threads(lambda: pushed_and_pulled(declared(first, "alone"))) == [1.0]


@pytest.mark.parametrize("every", [0, 1])
def test_a_table_of_one_worker_alone_goes_on_at_a_server_that_returns(
    new_cluster: NewCluster, every: int
) -> None:
    cluster = new_cluster(2, 2, every=every, updater=Added)
    first, second = workers(cluster, 2)
    table = declared(first, "alone")
    assert in_threads(lambda: pushed_and_pulled(table)) == [1.0]
    cluster.restart_server(1)
    assert in_threads(lambda: pushed_and_pulled(table)) == [2.0]
    later = declared(second, "alone")
    assert in_threads(lambda: pushed_and_pulled(later)) == [3.0]


def test_the_memory_of_servers_that_are_gone_is_given_back(new_cluster: NewCluster) -> None:
    cluster = new_cluster(1, 1, updater=Added)
    (worker,) = workers(cluster, 1)
    table = declared(worker, "t")

    def shared() -> int:
        links = [_target(link) for link in Path("/proc/self/fd").iterdir()]
        return sum("memfd:hvdlite-ps" in link for link in links)

    pushed_and_pulled(table)
    link = worker._servers[0]
    wait_until(lambda: link._connection is not None and link._connection.caller.sharing is not None)
    before = shared()
    for number in range(3):
        cluster.restart_server(0)
        assert pushed_and_pulled(table) == number + 2.0
        wait_until(lambda: link._connection.caller.sharing is not None)  # type: ignore[union-attr]
    wait_until(lambda: shared() <= before)


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


# -- barriers, at which a worker is lost, or misses the end


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


# -- workers that begin with different values: all servers take those of one of them


def workers_of(cluster: Cluster, count: int) -> list[Worker]:
    return in_threads(*[lambda n=n: cluster.worker(f"worker {n}", n) for n in range(count)])


def pulled(worker: Worker, name: str, mode: str) -> set[float]:
    """Declare a table whose elements are this worker's number; return what it begins with."""
    values: list[Array] = [np.full(size, float(worker.number)) for size in SIZES]
    table = worker.declare(name, SPECS, TableOptions(mode, None, part_bytes=800), lambda: values)
    found = [np.empty(size) for size in SIZES]
    table.pull(found)
    return set(np.concatenate(found))


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_workers_that_come_at_once_give_the_servers_no_mix(
    new_cluster: NewCluster, mode: str
) -> None:
    workers = workers_of(new_cluster(2, 3), 3)
    for name in map(str, range(10)):
        begun = in_threads(*[partial(pulled, worker, name, mode) for worker in workers])
        assert len(begun[0]) == 1
        assert begun == [begun[0]] * 3, "servers have begun with values of different workers"


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
@pytest.mark.parametrize("reached", [0, 1])
def test_another_takes_the_place_of_a_first_worker_that_is_lost(
    new_cluster: NewCluster, mode: str, reached: int
) -> None:
    """One of two servers may have its values, which no other worker has."""
    cluster = new_cluster(2, 3, worker_seconds=0.3)
    first, *others = workers_of(cluster, 3)
    cut_off = threading.Event()

    def lose(message: Message) -> int:
        if message.kind == "start":
            cut_off.set()
        return 0

    def begin() -> None:
        with pytest.raises(HorovodInternalError, match="its connections are closed"):
            pulled(first, "t", mode)

    for link in [*first._servers.values()][reached:]:
        link.send = lose  # type: ignore[method-assign]

    def goes_on(worker: Worker) -> set[float]:
        assert cut_off.wait(20)  # The first one has declared the table before.
        return pulled(worker, "t", mode)

    def is_lost() -> None:
        assert cut_off.wait(20)
        first.close()

    begun = in_threads(begin, is_lost, *[partial(goes_on, worker) for worker in others])
    assert begun == [None, None, {1.0}, {1.0}]
