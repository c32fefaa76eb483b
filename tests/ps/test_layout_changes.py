"""Servers come and go while others are killed and return: every push counts once, everywhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.ps.connections import system
from hvdlite.ps.connections.messages import Message
from hvdlite.ps.layouts.blocks import TensorSpec
from hvdlite.ps.layouts.layout import Layout
from hvdlite.ps.scheduler import changes
from hvdlite.ps.scheduler.changes import Change
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.server.snapshots import SnapshotFolder
from hvdlite.ps.tables.clocks import ASYNC, SSP, SYNC, Clocks, Mode
from hvdlite.ps.tables.description import TableDescription, describe_table
from hvdlite.ps.tables.row_store import RowsSpec
from hvdlite.ps.tables.saved import SavedTable
from hvdlite.ps.tables.table import Saved
from hvdlite.ps.worker import checkpoints
from hvdlite.ps.worker.shard import Shard
from tests.ps.cluster import Cluster, NewCluster, Trainer, in_threads, trainers, wait_until
from tests.ps.test_scaling import Added


def added_up(trainer: Trainer) -> set[float]:
    """Return how often 1 was added to each element."""
    counts = [array - np.arange(array.size) for array in trainer.values]
    return set(np.concatenate(counts).tolist())


def add_ones(trainer: Trainer, until: Callable[[], bool]) -> None:
    while not until():
        trainer.push_ones()
        trainer.table.pull(trainer.values)


def lose_a_step(cluster: Cluster, trainer: Trainer, *, lost: int, version: int = 6) -> None:
    """End a worker whose last push, which makes this version, is on one of two servers alone."""
    cluster.stop_server(lost)
    trainer.push_ones()
    snapshots = cluster.folder / "snapshots" / f"server-{1 - lost}"
    wait_until(lambda: any(snapshots.glob(f"t/*-{version:012}.safetensors")))
    trainer.worker.close()
    cluster.restart_server(lost)


@pytest.mark.parametrize(
    ("mode", "staleness", "goes"),
    [(SYNC, None, True), (SYNC, None, False), (ASYNC, None, True), (SSP, 1, False)],
)
def test_a_worker_and_a_server_return_while_servers_come_or_go(
    new_cluster: NewCluster, goes: bool, mode: str, staleness: int | None
) -> None:
    """One server has made a step that the other one, which is killed, has never seen."""
    cluster = new_cluster(2, 1, every=1, updater=Added)
    (first,) = trainers(cluster, 1, mode, staleness)
    add_ones(first, lambda: first.table.clock == 5)
    lose_a_step(cluster, first, lost=1 if goes else 0)
    if not goes:
        cluster.servers.append(cluster.start_server(2, joins=True))
        wait_until(lambda: cluster._is_member("server", 2))
    worker = cluster.worker("worker 0", 0)
    if goes:
        worker.scale_servers(1)
    again = Trainer(worker, mode, staleness)
    assert again.table.clock == 5
    registry = cluster.state.registry
    add_ones(again, lambda: registry.version == 2 and again.table.clock >= 20)
    assert registry.layout.num_servers == (1 if goes else 3)
    assert added_up(again) == {again.table.clock}


@pytest.mark.parametrize(
    ("mode", "staleness", "loads"), [(ASYNC, None, True), (SSP, 1, True), (SSP, 1, False)]
)
def test_a_worker_that_does_not_make_its_step_again_holds_nobody_up(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    mode: str, staleness: int | None, loads: bool,
) -> None:  # fmt: skip
    """A server has a step of it; its successor loads, or waits for steps of another worker."""
    monkeypatch.setattr(changes, "CHANGE_SECONDS", 0.5)
    monkeypatch.setattr(changes, "PAUSE_SECONDS", 2.0)
    cluster = new_cluster(2, 2, every=1, updater=Added)
    first, other = trainers(cluster, 2, mode, staleness)
    for trainer in (first, other):
        add_ones(trainer, lambda trainer=trainer: trainer.table.clock == 1)
    checkpoints.save(first.worker, cluster.folder / "saved")
    checkpoints.load(first.worker, cluster.folder / "saved")
    lose_a_step(cluster, first, lost=1, version=3)
    again = Trainer(cluster.worker("worker 0", 0), mode, staleness)
    other.table.pull(other.values)  # It has started there again.
    assert again.table.clock == 1
    other.worker.scale_servers(1)
    wait_until(lambda: "worker 0 has steps to make before" in caplog.text)
    if loads:
        checkpoints.load(again.worker, cluster.folder / "saved")  # It hears of the load before.
        assert again.worker.loads == 1
        checkpoints.load(again.worker, cluster.folder / "saved")
        assert again.worker.loads == 2
    else:
        add_ones(other, lambda: other.table.clock == 2)
    registry = cluster.state.registry
    for trainer in (again, other):
        add_ones(trainer, lambda trainer=trainer: trainer.table.clock >= 2)
    wait_until(lambda: registry.version == 2)
    again.table.pull(again.values)
    steps = again.table.clock + other.table.clock
    assert added_up(again) == {float(steps)}


@pytest.mark.parametrize(("mode", "staleness"), [(SYNC, None), (ASYNC, None), (SSP, 1)])
def test_a_step_that_is_made_again_counts_once_where_its_server_has_returned_meanwhile(
    new_cluster: NewCluster, mode: str, staleness: int | None
) -> None:
    """One server has a push of the worker before, and comes again before the step is repeated."""
    cluster = new_cluster(2, 1, every=1, updater=Added)
    (first,) = trainers(cluster, 1, mode, staleness)
    add_ones(first, lambda: first.table.clock == 5)
    lose_a_step(cluster, first, lost=1)
    again = Trainer(cluster.worker("worker 0", 0), mode, staleness)
    assert again.table.clock == 5
    cluster.restart_server(0)
    again.table.pull(again.values)  # It has started there again.
    add_ones(again, lambda: again.table.clock == 10)
    assert added_up(again) == {10.0}


def test_a_server_that_has_lost_a_step_which_is_made_again_rolls_nobody_back() -> None:
    """It comes again while the worker goes back to the step that another server lacks."""
    sent: list[Message] = []

    def send(message: Message) -> int:
        sent.append(message)
        return len(sent)

    shard = Shard("t", 0, 0, {}, list, send)
    heard: list[object] = []
    shard.on_rollback = heard.append
    shard.start(heard.append)
    shard.receive(Message("started", 1, "t", 0, body={"clock": 1}))
    shard.stand_at(1)
    heard.clear()
    shard.come_again()
    assert sent[-1].body["clock"] == 1
    shard.clock = 0
    shard.receive(Message("rolled_back", 2, "t", 0, body={"clock": 0}))
    shard.push({}, [], heard.append)
    assert (sent[-1].kind, sent[-1].clock, heard) == ("push", 0, [])


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_a_worker_that_is_lost_at_the_barrier_gives_the_change_up(
    new_cluster: NewCluster, mode: str
) -> None:
    """The others go on in the old layout; when it has returned, the change is made."""
    cluster = new_cluster(1, 2, every=1, updater=Added, worker_seconds=1.0)
    first, second = trainers(cluster, 2, mode)
    in_threads(
        *[lambda t=each: add_ones(t, lambda: t.table.clock == 3) for each in (first, second)]
    )
    second.worker.close()  # Before it can say at which step it is.
    cluster.servers.append(cluster.start_server(1, joins=True))
    registry, membership = cluster.state.registry, cluster.state.membership
    wait_until(lambda: membership.workers() == [0])
    add_ones(first, lambda: first.table.clock == 10)
    again = Trainer(cluster.worker("worker 1", 1), mode)
    end = first.table.clock + 10

    def done(trainer: Trainer) -> bool:
        return registry.version == 2 and trainer.table.clock >= end

    in_threads(*[lambda t=each: add_ones(t, lambda: done(t)) for each in (first, again)])
    first.table.pull(first.values)
    assert len(added_up(first)) == 1


def test_a_worker_that_has_made_all_its_steps_holds_no_change_up(new_cluster: NewCluster) -> None:
    """In ssp it waits for the others at a barrier, further than they are."""
    cluster = new_cluster(1, 2, updater=Added)
    first, second = trainers(cluster, 2, SSP, 9)
    registry = cluster.state.registry

    def finish() -> None:
        add_ones(first, lambda: first.table.clock == 8)
        first.worker.barrier()

    def go_on() -> None:
        cluster.servers.append(cluster.start_server(1, joins=True))
        wait_until(lambda: registry.version == 2)
        add_ones(second, lambda: second.table.clock == 5)
        second.worker.barrier()

    in_threads(finish, go_on)
    first.table.pull(first.values)
    assert added_up(first) == {13.0}


def test_a_change_says_for_whom_it_waits(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker has come again, and does not declare the table in which it took part."""
    monkeypatch.setattr(changes, "WARNING_SECONDS", 0.05)
    cluster = new_cluster(1, 2, updater=Added)
    first, second = trainers(cluster, 2, ASYNC)
    second.worker.close()
    again = cluster.worker("worker 1", 1)
    cluster.servers.append(cluster.start_server(1, joins=True))
    wanted = "to have 2 servers, and goes on with 1: worker 1 has not begun the table 't' for"
    wait_until(lambda: wanted in caplog.text)
    add_ones(first, lambda: first.table.clock == 5)
    again.leave()
    wait_until(lambda: cluster.state.registry.version == 2)
    add_ones(first, lambda: first.table.clock == 9)
    assert added_up(first) == {9.0}


def test_a_server_that_no_scheduler_can_write_down_does_not_count(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = new_cluster(1, 1, every=1, updater=Added)
    (trainer,) = trainers(cluster, 1)
    replace, refused = system.replace, []

    def no_space(source: Any, target: Any) -> None:
        if (
            Path(target).name == "scheduler.json"
            and len(refused) < 5
            and cluster.state.changes.current
        ):
            refused.append(cluster.state.registry.version)
            raise OSError("no space left")
        replace(source, target)

    monkeypatch.setattr(system, "replace", no_space)
    cluster.servers.append(cluster.start_server(1, joins=True))
    add_ones(trainer, lambda: cluster.state.registry.version == 2 and len(refused) == 5)
    assert added_up(trainer) == {trainer.table.clock}


def test_weights_that_are_lost_with_a_server_end_all_workers_and_are_named(
    new_cluster: NewCluster,
) -> None:
    """No snapshots: the workers that had pulled them are killed, too."""
    cluster = new_cluster(2, 2)
    pair = trainers(cluster, 2)
    in_threads(*[partial(trainer.train, 5) for trainer in pair])
    wait_until(lambda: cluster.state.registry.reached.get("t", 0) > 0)
    for trainer in pair:
        trainer.worker.close()
    cluster.restart_server(0)

    def enter(number: int) -> None:
        with pytest.raises(HorovodInternalError, match=r"server 0 .*the table 't' had version \d"):
            Trainer(cluster.worker(f"worker {number}", number))

    in_threads(*[partial(enter, number) for number in range(2)])
    for server in cluster.servers:
        server.wait()
        assert "the table 't' had version" in str(server.error)


def test_rows_that_are_lost_with_a_server_end_the_job_and_are_named(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(2, 1)
    worker = cluster.worker("worker 0")
    options = TableOptions(ASYNC, None, rows=RowsSpec(30, 4, "float64", seed=3).fields)
    rows = worker.declare_rows(TensorSpec("rows", "float64", (30, 4)), options)
    rows.push(np.arange(30), np.ones((30, 4))).wait()
    wait_until(lambda: cluster.state.registry.reached.get("rows", 0) > 0)
    cluster.restart_server(1)
    with pytest.raises(HorovodInternalError, match=r"server 1 .*the table 'rows' had version 1"):
        rows.pull(np.arange(30)).wait()


def test_the_border_of_ssp_asks_for_no_step_where_all_servers_have_the_same() -> None:
    change = a_change(SSP)
    for worker, clock in ((0, 9), (1, 4)):
        change.report(worker, {"t": clock})
    change.look([0, 1])
    for server in (0, 1):
        change.stand(server, {"t": (13, {0: 9, 1: 4})})
    change.look([0, 1])
    assert change.borders == {"t": {0: 9, 1: 4}}


def a_change(mode: str, servers: int = 2) -> Change:
    old, new = Layout((), (), servers), Layout((), (), 3)
    return Change(1, new, old, {"t": mode}, {})


@pytest.mark.parametrize(
    ("mode", "borders"), [(SYNC, {0: 7, 1: 7}), (SSP, {0: 6, 1: 4}), (ASYNC, {0: 6, 1: 4})]
)
def test_the_border_is_what_any_server_has(mode: str, borders: dict[int, int]) -> None:
    """Worker 0 has returned at step 5, of which one server has its push; one has the version 7."""
    change = a_change(mode)
    change.stand(0, {"t": (7, {0: 5, 1: 4})})  # Too early: pushes may be under way.
    change.report(0, {"t": 5})
    assert not change.look([0, 1])
    assert change.describe()["is_quiet"] is False
    change.report(1, {"t": 4})
    assert not change.look([0, 1])
    assert change.describe()["is_quiet"] is True
    change.stand(0, {"t": (7, {0: 5, 1: 4})})
    assert not change.look([0, 1])
    assert change.borders is None
    change.stand(1, {"t": (5, {0: 6, 1: 4})})
    assert not change.look([0, 1])
    assert change.borders == {"t": borders}
    change.ready |= {0, 1}
    assert not change.look([0, 1])
    change.ready.add(2)
    assert change.look([0, 1])


class Stale:
    """Workers of ssp and what the servers know of them, as a job that somebody disturbs."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        workers, servers = self.dice.randint(1, 4), self.dice.randint(1, 3)
        mode = Mode(SSP, self.dice.randint(0, 3))
        self.clocks = [Clocks(mode, 0, dict.fromkeys(range(workers), 0)) for _ in range(servers)]
        # Of each worker: its next step at each server. One that has pulled for it may push it.
        self.steps = [[0] * servers for _ in range(workers)]
        self.pulled = [False] * workers

    def act(self, worker: int, *, may_stop: bool = True) -> bool:
        """Let a worker pull, or push to some servers at least; return whether it could."""
        steps = self.steps[worker]
        if not self.pulled[worker]:
            may = all(
                each.may_pull(worker, step) for each, step in zip(self.clocks, steps, strict=True)
            )
            self.pulled[worker] = may
            return may
        lowest = min(steps)
        for server in self.dice.sample(range(len(steps)), len(steps)):
            if steps[server] == lowest:
                self.clocks[server].push(worker, lowest)
                steps[server] += 1
                if may_stop and self.dice.random() < 0.2:
                    return True
        self.pulled[worker] = False
        return True

    def kill(self, worker: int) -> None:
        """Let it begin where it can at all servers, as `TableShards` does."""
        lowest = min(each.finished[worker] for each in self.clocks)
        self.steps[worker] = [lowest] * len(self.clocks)
        self.pulled[worker] = False


@pytest.mark.parametrize("seed", range(40))
def test_whoever_repeats_steps_of_ssp_comes_to_its_border_alone(seed: int) -> None:
    """All others stand at theirs, at which they may have come to their end."""
    job = Stale(seed)
    workers = range(len(job.steps))
    for _ in range(60):
        job.act(job.dice.choice(workers))
        if job.dice.random() < 0.1:
            job.kill(job.dice.choice(workers))
    change = a_change(SSP, len(job.clocks))
    for worker in workers:
        change.report(worker, {"t": min(job.steps[worker])})
    change.look(workers)
    for server, clocks in enumerate(job.clocks):
        change.stand(server, {"t": (0, dict(clocks.finished))})
    change.look(workers)
    assert change.borders is not None
    borders = change.borders["t"]
    for worker in workers:
        made = max(clocks.finished[worker] for clocks in job.clocks)
        assert borders[worker] == made  # None is asked for a step that it has not made before.
        while min(job.steps[worker]) < made:
            assert job.act(worker, may_stop=False)
    for clocks in job.clocks:
        assert clocks.finished == borders


def test_what_a_change_has_saved_displaces_nothing_until_it_counts(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path, 0)

    def write(layout: int, version: int) -> None:
        about = TableDescription("t", describe_table([], [], Mode(SYNC), average=True))
        folder.write(SavedTable(about, Saved([], {}, version, {}, []), layout))

    write(1, 4)
    for version in (5, 6, 7):  # Of changes that were all given up, by a server that was killed.
        write(2, version)
    (kept,) = folder.newest(1)
    assert kept.saved.version == 4
    folder.keep_only(1)
    assert folder.newest(2) == [] and [each.saved.version for each in folder.newest(1)] == [4]
    write(2, 4)
    folder.keep_only(2)
    assert folder.newest(1) == [] and [each.saved.version for each in folder.newest(2)] == [4]
    assert folder.go_back("t", 4, 1) is None
