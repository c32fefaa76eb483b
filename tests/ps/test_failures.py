"""What is lost while workers train, and what becomes of it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlite.common.base.errors import ConfigError, HorovodInternalError
from hvdlite.ps.cluster import enrolment
from hvdlite.ps.cluster.settings import ClusterSettings
from hvdlite.ps.connections.client import Client
from hvdlite.ps.connections.messages import SCHEDULER, SERVER, WORKER, Message
from hvdlite.ps.layouts.blocks import TensorSpec
from hvdlite.ps.raw_calls import RawTable
from hvdlite.ps.scheduler import scheduler
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.scheduler.running import run_scheduler
from hvdlite.ps.server import running, server
from hvdlite.ps.tables.clocks import ASYNC, SSP, SYNC
from hvdlite.ps.tables.description import TableDescription
from hvdlite.ps.tables.row_store import RowsSpec
from hvdlite.ps.tables.updater import Added
from hvdlite.ps.worker import checkpoints
from hvdlite.ps.worker import worker as worker_module
from hvdlite.ps.worker.remote_rows import RemoteRows
from hvdlite.ps.worker.shard import PsRolledBack
from hvdlite.ps.worker.worker import Worker
from tests.ps.cluster import (
    LIMIT_SECONDS,
    Cluster,
    Loop,
    NewCluster,
    Trainer,
    bits,
    in_threads,
    train_in_one,
    trainers,
    wait_until,
    with_one,
    with_two,
)
from tests.ps.sites import held_port
from tests.ps.test_tables import Broken, Momentum


def both(_step: int) -> list[int]:
    return [0, 1]


# -- servers


@pytest.mark.parametrize("every", [0, 1, 3])
def test_a_killed_server_returns_and_training_goes_on(new_cluster: NewCluster, every: int) -> None:
    """With each version saved, the run is bitwise an undisturbed one; without, all agree."""
    cluster, first, second = with_two(new_cluster, 2, every=every)
    turn = threading.Barrier(3)

    def main(trainer: Trainer) -> None:
        for until in (6, 12):
            trainer.train(until)
            turn.wait(20)
        trainer.train(20)

    def lose() -> None:
        for number in (0, 1):
            turn.wait(20)
            cluster.restart_server(number)  # in the middle of a step

    in_threads(lambda: main(first), lambda: main(second), lose)
    assert bits(first.values) == bits(second.values)
    assert first.table.version == 20
    if every == 1:
        assert bits(first.values) == train_in_one(20, both)


def test_async_goes_on_from_the_newest_values_of_workers(new_cluster: NewCluster) -> None:
    cluster, first, second = with_two(new_cluster, 1, 30, ASYNC, every=20)
    pulled = max(first.table.version, second.table.version)
    cluster.restart_server(0)
    first.table.pull(first.values)
    assert first.table.version == pulled > 60 - 20
    in_threads(lambda: first.train(40), lambda: second.train(40))
    assert first.table.clock == second.table.clock == 40


@pytest.mark.parametrize("lost", [0, 1])
def test_steps_that_nobody_has_are_done_again_on_all_servers(
    new_cluster: NewCluster, lost: int
) -> None:
    """Workers that only push have no newer values: all go back, and the run is bitwise the same."""
    cluster = new_cluster(2, 2, every=20)
    pair = trainers(cluster, 2)

    def push(until: int) -> Callable[[Trainer], None]:
        def body(trainer: Trainer) -> None:
            while trainer.table.clock < until:
                handle = trainer.push()
                assert handle.ended_within(20)
                handle.wait()

        return body

    in_threads(*[lambda t=trainer: push(33)(t) for trainer in pair])
    cluster.restart_server(lost)
    begin = time.monotonic()

    def goes_back(trainer: Trainer) -> int:
        with pytest.raises(PsRolledBack, match="goes on from step 20, and this worker") as raised:
            trainer.train(40)
        return raised.value.version

    assert in_threads(*[lambda t=trainer: goes_back(t) for trainer in pair]) == [20, 20]
    assert time.monotonic() - begin < LIMIT_SECONDS
    assert [trainer.table.clock for trainer in pair] == [20, 20]
    in_threads(*[lambda t=trainer: t.train(40) for trainer in pair])
    assert [bits(trainer.values) for trainer in pair] == [train_in_one(40, both)] * 2


def test_a_push_that_a_rollback_overtakes_fails_at_all_servers(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradients are those of a step that is lost, and no server may count them for another."""
    (trainer,) = trainers(new_cluster(2, 1), 1)
    trainer.train(5)
    table, error = trainer.table, PsRolledBack("two steps are lost", 3)
    let_pass = table.gate.let_pass

    def overtaken(push: object) -> None:
        let_pass(push)
        over = threading.Event()
        table._client.call(lambda: (table._go_back(error), over.set()))
        assert over.wait(LIMIT_SECONDS)

    monkeypatch.setattr(table.gate, "let_pass", overtaken)
    handle = trainer.push()
    assert handle.ended_within(LIMIT_SECONDS)
    with pytest.raises(PsRolledBack, match="two steps"):
        handle.wait()


def test_a_worker_that_has_come_again_loses_no_step_that_it_did_not_make(
    new_cluster: NewCluster,
) -> None:
    """Its first pull waits for a step that its process before pushed, and that is lost then."""
    cluster, first, second = with_two(new_cluster, 1, 5, every=1)
    assert first.push().ended_within(LIMIT_SECONDS)
    first.worker.close()
    worker = cluster.worker("worker 0", 0)
    pulled: list[Trainer] = []
    pulling = threading.Thread(target=lambda: pulled.append(Trainer(worker)))
    pulling.start()
    wait_until(lambda: "t" in worker.named and worker.named["t"]._shards[0].waits)
    assert worker.named["t"].clock == 6
    cluster.restart_server(0)  # Its snapshot has no push of a step that is open.
    pulling.join(LIMIT_SECONDS)
    (again,) = pulled
    assert again.table.clock == 5
    in_threads(lambda: again.train(9), lambda: second.train(9))
    assert [bits(each.values) for each in (again, second)] == [train_in_one(9, both)] * 2


@pytest.mark.parametrize("again", [False, True])
def test_a_worker_that_leaves_a_step_half_pushed_is_told(
    new_cluster: NewCluster, caplog: pytest.LogCaptureFixture, again: bool
) -> None:
    cluster, first, second = with_two(new_cluster, 2)
    shard, ended = first.table._shards[1], threading.Event()
    payloads = first.table._cut(first.values, 1)
    first.worker._client.call(lambda: shard.push({}, payloads, lambda _: ended.set()))
    assert ended.wait(LIMIT_SECONDS)
    first.worker.close()
    third = Trainer(cluster.worker("worker 0", 0))
    assert third.table.is_half_pushed and third.table.clock == 0
    if again:
        in_threads(lambda: third.train(1), lambda: second.train(1))
    third.worker.leave()
    told = [each.message for each in caplog.records if "leaves" in each.message]
    assert [text.partition(",")[0] for text in told] == ([] if again else ["worker 0 leaves"])
    assert again or "its push of step 0 of the table 't', which others have not" in told[0]


@pytest.mark.parametrize(
    ("mode", "every"), [((ASYNC, None), 1), ((ASYNC, None), 100), ((SSP, 3), 100)]
)
def test_workers_hear_of_updates_that_are_lost_with_a_server(
    new_cluster: NewCluster, caplog: pytest.LogCaptureFixture, mode: tuple[str, int | None],
    every: int,
) -> None:  # fmt: skip
    """In sync they are to go back, as other tests show."""
    cluster, first, second = with_two(new_cluster, 1, 0, *mode, every=every)
    for trainer in (first, second, first, second):
        trainer.push().wait()
    cluster.restart_server(0)
    in_threads(lambda: first.train(3), lambda: second.train(3))
    told = [each.getMessage() for each in caplog.records if "goes on from" in each.getMessage()]
    expected = "the table 't' goes on from version 0 on server 0, and had {}: the server was lost"
    assert sorted(text.partition(",")[0] for text in told) == (
        [] if every == 1 else ["the table 't' goes on from version 0 on server 0"] * 2
    )
    assert every == 1 or any(text.startswith(expected.format(4)) for text in told)


def test_a_server_that_does_not_return_ends_the_job_and_is_named(new_cluster: NewCluster) -> None:
    cluster, first, second = with_two(new_cluster, 2, server_seconds=0.3)
    cluster.servers[1].end()

    def fails(trainer: Trainer, call: Callable[[], Any]) -> None:
        with pytest.raises(HorovodInternalError, match=r"server 1 \(127.*\) is lost: nothing"):
            call()
        with pytest.raises(HorovodInternalError, match="server 1"):
            trainer.table.pull(trainer.values)

    in_threads(
        lambda: fails(first, lambda: first.train(9)), lambda: fails(second, second.worker.barrier)
    )
    cluster.servers[0].wait()
    assert "server 1" in str(cluster.servers[0].error)


def test_a_damaged_snapshot_ends_the_job_and_is_named(new_cluster: NewCluster) -> None:
    cluster, trainer = with_one(new_cluster, 1, 3, every=1)
    cluster.servers[0].end()
    newest = max((cluster.folder / "snapshots").rglob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1])
    cluster.servers[0] = cluster.start_server(0)
    with pytest.raises(HorovodInternalError, match=rf"server 0 has ended: .*{newest.name}"):
        trainer.train(9)
    cluster.servers[0].wait()
    assert newest.name in str(cluster.servers[0].error)


# -- workers


def come_back(cluster: Cluster, trainer: Trainer, mode: str = SYNC) -> Trainer:
    """Kill a worker, and start it again."""
    name = f"worker {trainer.worker.number}"
    trainer.worker.close()
    return Trainer(cluster.worker(name, num_workers=2), mode)


@pytest.mark.thorough
def test_a_killed_worker_returns_and_the_run_is_bitwise_undisturbed(
    new_cluster: NewCluster,
) -> None:
    cluster, first, second = with_two(new_cluster, 2, 5)

    links = [*first.worker._servers.values()]
    connections = [link._connection for link in links if link._connection is not None]
    before = [connection.resent for connection in connections]
    begin = time.monotonic()

    def returns() -> Trainer:
        second.worker.close()
        for connection, count in zip(connections, before, strict=True):  # The first one waits.
            wait_until(lambda at=connection, n=count: at.resent >= n + 2)  # type: ignore[misc]
        again = come_back(cluster, second)
        assert again.table.clock == 5
        again.train(12)
        return again

    _, again = in_threads(lambda: first.train(12), returns)
    assert bits(first.values) == bits(again.values) == train_in_one(12, both)
    # A push and a pull of each step; each is sent again after 0.1 s, 0.3 s, 0.7 s and so on.
    most = 2 * 7 * math.log2((time.monotonic() - begin) / 0.1 + 1)
    for connection, count in zip(connections, before, strict=True):
        assert 2 <= connection.resent - count <= most


def test_a_worker_whose_place_another_one_has_ends_with_an_error_that_names_both(
    new_cluster: NewCluster,
) -> None:
    """It lives, and throws its successor out nowhere."""
    cluster, first, second = with_two(new_cluster, 2, 3)
    again = Trainer(cluster.worker("worker 1 is started twice", 1))
    says = r"worker 1 is the process \d+@\S+ now, and this is the process \d+@\S+, which"
    with pytest.raises(HorovodInternalError, match=says):
        second.train(4)
    wait_until(lambda: "the scheduler says: worker 1 is the process" in second.worker.failure)
    in_threads(lambda: first.train(9), lambda: again.train(9))
    assert bits(first.values) == bits(again.values) == train_in_one(9, both)


def test_a_server_whose_place_another_one_has_ends_with_an_error_that_names_both(
    new_cluster: NewCluster,
) -> None:
    cluster, trainer = with_one(new_cluster, 1, 3, every=1)
    former = cluster.servers[0]
    cluster.servers[0] = cluster.start_server(0)
    former.wait()
    assert "server 0 is the process" in str(former.error)
    trainer.train(9)
    assert bits(trainer.values) == train_in_one(9, lambda _: [0])


def test_a_worker_killed_between_two_pushes_does_its_step_again(new_cluster: NewCluster) -> None:
    """One server has its push, and has even finished the step; the other has not."""
    cluster, first, second = with_two(new_cluster, 2, 5)
    first.push()
    shards, second.table._shards = second.table._shards, second.table._shards[:1]
    second.push().wait()
    second.table._shards = shards
    again = come_back(cluster, second)
    assert (again.table.clock, again.table.version) == (5, 5)
    assert bits(again.values) == train_in_one(5, both)

    def main() -> None:
        first.table.pull(first.values)
        first.train(12)

    in_threads(main, lambda: again.train(12))
    assert bits(first.values) == bits(again.values) == train_in_one(12, both)


def test_sync_waits_for_a_lost_worker_and_goes_on_without_it(new_cluster: NewCluster) -> None:
    cluster = new_cluster(2, 3, worker_seconds=0.4)
    first, second, third = trainers(cluster, 3)
    in_threads(*[lambda t=trainer: t.train(4) for trainer in (first, second, third)])
    third.worker.close()
    in_threads(lambda: first.train(9), lambda: second.train(9))
    assert bits(first.values) == bits(second.values)
    assert bits(first.values) == train_in_one(9, lambda step: [0, 1, 2] if step < 4 else [0, 1])


def test_a_worker_beats_several_times_within_the_silence_that_counts_as_its_loss(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = new_cluster(1, 1, worker_seconds=0.4)
    monkeypatch.setattr(enrolment, "BEAT_SECONDS", 2.0)
    worker = cluster.worker("worker 0", worker_seconds=0.4)
    member = cluster.state.membership.members["worker", 0]
    for _ in range(4):
        wait_until(lambda heard=member.heard: member.heard > heard, 0.4)  # type: ignore[misc]
    assert cluster.state.membership.workers() == [worker.number]


@pytest.mark.parametrize(("mode", "staleness"), [(ASYNC, None), (SSP, 3)])
def test_nobody_waits_for_a_lost_worker_beyond_the_bound(
    new_cluster: NewCluster, mode: str, staleness: int | None
) -> None:
    _, first, second = with_two(
        new_cluster, 1, 0, mode, staleness, worker_seconds=0.4 if mode == SSP else 30.0
    )
    second.worker.close()
    first.train(20)
    assert first.table.clock == 20


def test_a_worker_that_leaves_is_counted_no_more_and_may_return(new_cluster: NewCluster) -> None:
    cluster, first, second = with_two(new_cluster, 2, 4)
    second.worker.leave()
    first.train(7)
    assert bits(first.values) == train_in_one(7, lambda step: [0, 1] if step < 4 else [0])
    again = Trainer(cluster.worker("worker 1"))
    begins = again.table.clock
    in_threads(lambda: first.train(12), lambda: again.train(12))
    assert begins == 7
    assert bits(first.values) == bits(again.values)
    assert bits(first.values) == train_in_one(12, lambda step: [0] if 4 <= step < 7 else [0, 1])


# -- the scheduler


def test_no_step_is_lost_while_the_scheduler_is_away(new_cluster: NewCluster) -> None:
    cluster, first, second = with_two(new_cluster, 2, every=1)
    cluster.scheduler.end()
    in_threads(lambda: first.train(10), lambda: second.train(10))
    cluster.start_scheduler()
    in_threads(first.worker.barrier, second.worker.barrier)
    wait_until(lambda: all(each.peer for each in cluster.state.membership.members.values()))
    cluster.restart_server(0)  # all that is needed for it is known again
    in_threads(lambda: first.train(20), lambda: second.train(20))
    assert bits(first.values) == bits(second.values) == train_in_one(20, both)


def test_a_worker_leaves_before_a_scheduler_that_came_again_has_heard_of_it(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrolment, "BEAT_SECONDS", 60.0)  # the leave is what it hears first
    cluster = new_cluster(1, 2, every=1)
    first, _ = (each.worker for each in trainers(cluster, 2))
    cluster.scheduler.end()
    cluster.start_scheduler()
    first.leave()
    assert cluster.state.membership.workers() == [1]


def test_who_leaves_is_gone_whatever_was_under_way(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = new_cluster(1, 1)
    monkeypatch.setattr(enrolment, "BEAT_SECONDS", 0.0)  # a beat follows each answer
    client = Client(b"worker a", cluster.settings.token)
    own = enrolment.Enrolment(client, cluster.settings, changed=lambda _body: None)
    own.enter(LIMIT_SECONDS)
    own.leave()
    fence = Message("clocks", body={"change": 0, "clocks": {}})
    for _ in range(8):  # a hello, its challenge and its proof would be done then
        client.ask(lambda done: own.request(fence, done)).wait()
    client.close()
    assert cluster.state.membership.workers() == []


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_all_that_was_pushed_before_a_worker_leaves_counts(
    new_cluster: NewCluster, mode: str
) -> None:
    """Pushes begin one after another, and a pull among them waits for the other worker."""
    cluster = new_cluster(2, 2, updater=Added)
    spec, rows = TensorSpec("w", "float64", (1000,)), RowsSpec(5, 2, "float64", 0, "zeros")
    options = TableOptions(mode, average=False)

    def tables(number: int) -> tuple[Worker, RawTable, RemoteRows]:
        worker = cluster.worker(f"worker {number}", number)
        values = [np.zeros(spec.size)]
        table = worker.declare("w", [spec], options, lambda: values, RawTable)
        of_rows = TensorSpec("rows", "float64", (5, 2))
        return worker, table, worker.declare_rows(of_rows, options._replace(rows=rows.fields))

    (stays, kept, kept_rows), (leaves, left, left_rows) = in_threads(
        lambda: tables(0), lambda: tables(1)
    )
    for count in range(40):
        left.push_async(np.ones(spec.size))
        left_rows.push([1, 3], np.ones((2, 2)))
        if count % 10 == 5:
            pulls = [left.pull_async(), left_rows.pull([0])]
    leaves.leave()
    for handle in pulls:
        assert handle.ended_within(20)
    wait_until(lambda: cluster.state.membership.workers() == [0])
    for _ in range(40):
        kept.push_async(np.ones(spec.size))
        kept_rows.push([1], np.ones((1, 2)))
    assert np.array_equal(kept.pull_async().wait(), np.full(spec.size, 80.0))
    assert kept_rows.pull(range(5)).wait()[:, 0].tolist() == [0, 80, 0, 40, 0]
    stays.leave()


def test_a_worker_that_leaves_says_which_pushes_are_lost(
    new_cluster: NewCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "LEAVE_SECONDS", 0.5)
    cluster = new_cluster(2, 1, server_seconds=0.3, updater=Added)
    worker = cluster.worker("worker 0")
    spec = TensorSpec("w", "float64", (1000,))
    values = [np.zeros(spec.size)]
    table = worker.declare("w", [spec], TableOptions(ASYNC), lambda: values, RawTable)
    cluster.servers[1].end()
    for _ in range(3):
        table.push_async(np.ones(spec.size))
    worker.leave()
    (told,) = [each.getMessage() for each in caplog.records if "leaves" in each.getMessage()]
    assert told.startswith("worker 0 leaves, and 3 of its pushes to the table 'w' are lost: server")


def test_the_scheduler_ends_with_the_job_though_a_worker_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((enrolment, "BEAT_SECONDS"), (server, "LOOK_SECONDS")):
        monkeypatch.setattr(module, name, 0.05)
    for module, name in ((scheduler, "LOOK_SECONDS"), (running, "LAST_SECONDS")):
        monkeypatch.setattr(module, name, 0.05)
    with held_port() as port:
        settings = ClusterSettings(
            SCHEDULER, f"127.0.0.1:{port}", 1, 2, independent=True, worker_seconds=0.4
        )
        loops = [
            Loop(lambda _: run_scheduler(settings)),
            Loop(
                lambda _: running.run_server(replace(settings, role=SERVER), lambda _: Momentum())
            ),
        ]
        words = replace(settings, role=WORKER)
        leaves, dies = in_threads(lambda: Worker(words), lambda: Worker(words))
        dies.close()
        leaves.leave()
        for loop in loops:
            loop.wait()
        assert [loop.error for loop in loops] == [None, None]


# -- who may come


def test_a_wrong_token_is_refused_and_the_others_are_untouched(new_cluster: NewCluster) -> None:
    cluster, trainer = with_one(new_cluster, 1)
    with pytest.raises(ConfigError, match="scheduler says: HVDLITE_PS_TOKEN is another one there"):
        cluster.worker("stranger", token=b"a guess")
    trainer.train(5)
    assert bits(trainer.values) == train_in_one(5, lambda _step: [0])


def test_a_surplus_worker_is_refused(new_cluster: NewCluster) -> None:
    cluster, _ = with_one(new_cluster, 1)
    with pytest.raises(ConfigError, match="all 1 workers are there"):
        cluster.worker("surplus")
    with pytest.raises(ConfigError, match="has 1 workers, and this worker was told of 2"):
        cluster.worker("another", num_workers=2)


def test_all_is_encrypted_with_keys_from_the_token(new_cluster: NewCluster) -> None:
    _, trainer = with_one(new_cluster, 1, 5, tls=True)
    assert bits(trainer.values) == train_in_one(5, lambda _step: [0])


@pytest.mark.parametrize("encrypted", [True, False])
def test_who_is_never_answered_hears_what_may_be_wrong(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    cluster, _ = with_one(new_cluster, 1, tls=encrypted)
    monkeypatch.setattr("hvdlite.ps.worker.worker.ANSWER_SECONDS", 0.2)
    with pytest.raises(HorovodInternalError, match="the same HVDLITE_PS_TLS and HVDLITE_PS_TO"):
        cluster.worker("stranger", start_seconds=0.1, tls=not encrypted)


def test_a_table_that_differs_fails_in_that_worker_alone(
    new_cluster: NewCluster, tmp_path: Path
) -> None:
    _, first, second = with_two(new_cluster, 1)
    with pytest.raises(HorovodInternalError, match=r"disagree on the staleness|disagree on the mo"):
        Trainer(second.worker, ASYNC)
    in_threads(lambda: first.train(3), lambda: second.train(3))
    assert bits(first.values) == train_in_one(3, both)


@pytest.mark.parametrize(("mode", "staleness"), [(SYNC, None), (ASYNC, None), (SSP, 1)])
def test_an_optimizer_that_fails_fails_its_table_in_all_workers_and_no_server(
    new_cluster: NewCluster, mode: str, staleness: int | None
) -> None:
    good, made = 3 if mode == SYNC else 6, list[Momentum]()

    def new_updater(_: TableDescription) -> Momentum:
        made.append(Momentum() if made else Broken(*range(good)))  # On one of the servers alone.
        return made[-1]

    words = {"updater_of": new_updater, "every": 1}
    cluster, first, second = with_two(new_cluster, 2, 3, mode, staleness, **words)
    wanted = rf"^server [01], table 't': the update from version {good} has failed .*'it divides"
    folder = cluster.folder / "saved"

    def fails(ask: Callable[[], Any]) -> str:
        with pytest.raises(HorovodInternalError, match=wanted) as caught:
            ask()
        return str(caught.value)

    def go_on(trainer: Trainer) -> list[str]:
        return [
            fails(lambda: trainer.train(4)), fails(lambda: trainer.push().wait()),
            fails(lambda: trainer.table.pull([])),
            fails(lambda: checkpoints.save(trainer.worker, folder)),
            fails(lambda: checkpoints.load(trainer.worker, folder)),
        ]  # fmt: skip

    why = in_threads(lambda: go_on(first), lambda: go_on(second))
    assert len({*why[0], *why[1]}) == 1

    # A worker that is lost ends no server, and other tables do not suffer.
    second.worker.close()
    spec, options = [TensorSpec("r", "float64", (5,))], TableOptions(ASYNC)
    other = first.worker.declare("r", spec, options, lambda: [np.zeros(5)], RawTable)
    other.push_async(np.ones(5)).wait()
    np.testing.assert_array_equal(other.pull_async().wait(), np.full(5, -0.5))
    assert all(each.error is None for each in cluster.servers)
