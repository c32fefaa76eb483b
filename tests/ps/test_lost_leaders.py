"""Whoever leads a load is lost between two servers: all of them have what was loaded, or none.

Servers may be lost at the same time: they read it anew when they come again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.ps.connections.messages import Message
from hvdlite.ps.layouts.blocks import TensorSpec
from hvdlite.ps.scheduler import changes
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.server.snapshots import SnapshotFolder
from hvdlite.ps.tables.clocks import ASYNC, SSP, SYNC
from hvdlite.ps.tables.row_store import RowsSpec
from hvdlite.ps.tables.saved import SavedTable
from hvdlite.ps.worker import checkpoints
from hvdlite.ps.worker.worker import Worker
from tests.ps.cluster import (
    SIZES,
    SPECS,
    Cluster,
    NewCluster,
    Trainer,
    in_threads,
    wait_until,
    with_one,
    with_two,
)
from tests.ps.test_layout_changes import add_ones, added_up
from tests.ps.test_loads import saved_twos
from tests.ps.test_scaling import Added


def kill_leader(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, leader: Worker, servers: int,
    meanwhile: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Let a worker load that is lost when it has told so many servers to have what they read."""
    ask = Worker.ask_servers

    def ask_some(worker: Worker, count: int, message: Message) -> list[Message]:
        if worker is not leader or message.body.get("phase") != "apply":
            return ask(worker, count, message)
        if servers:
            ask(worker, servers, message)
        meanwhile()
        leader.close()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, suppress(KeyboardInterrupt, Exception):
        patched.setattr(Worker, "ask_servers", ask_some)
        checkpoints.load(leader, cluster.folder / "saved")


def stop_before_load(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, leader: Worker) -> None:
    """Let server 1 stand still before it hears that a load counts."""
    ask = Worker.ask

    def ask_after(worker: Worker, message: Message) -> Message:
        if worker is leader and message.body.get("load") and 1 not in cluster.stopped:
            cluster.stop_server(1)
        return ask(worker, message)

    monkeypatch.setattr(Worker, "ask", ask_after)


def go_on(again: Trainer, other: Trainer) -> None:
    """Push ones, and compare all elements, on whatever server."""
    begins = [trainer.table.clock for trainer in (again, other)]

    def make_two(trainer: Trainer, begin: int) -> None:
        add_ones(trainer, lambda: trainer.table.clock >= begin + 2)

    in_threads(partial(make_two, again, begins[0]), partial(make_two, other, begins[1]))
    again.table.pull(again.values)
    ones = 2 if again.table.is_sync else 4  # In sync, their average counts.
    assert added_up(again) == {2.0 + ones}


@pytest.mark.parametrize(
    ("mode", "staleness", "told"), [(SYNC, None, 0), (SYNC, None, 1), (ASYNC, None, 1), (SSP, 9, 0)]
)
def test_all_servers_load_without_who_leads(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, mode: str, staleness: int | None,
    told: int,
) -> None:  # fmt: skip
    cluster = new_cluster(2, 2, updater=Added)
    first, second = saved_twos(cluster, mode, staleness)
    kill_leader(cluster, monkeypatch, first.worker, told)
    again = Trainer(cluster.worker("worker 0", 0), mode, staleness)
    go_on(again, second)
    checkpoints.load(second.worker, cluster.folder / "saved")  # It was made for all.
    assert second.worker.loads == 1
    second.table.pull(second.values)
    assert added_up(second) == {2.0 + (2 if mode == SYNC else 4)}


def test_nobody_waits_for_who_leads(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not come again, and its scheduler does, who knows that the load has begun."""
    cluster = new_cluster(2, 2, updater=Added, worker_seconds=1.0)
    first, second = saved_twos(cluster, ASYNC)

    def restart_scheduler() -> None:
        cluster.scheduler.end()
        cluster.start_scheduler()

    kill_leader(cluster, monkeypatch, first.worker, 1, restart_scheduler)
    add_ones(second, lambda: second.table.clock == 7)
    assert added_up(second) == {5.0}


@pytest.mark.parametrize(
    ("mode", "staleness", "every"),
    [(SYNC, None, 0), (SYNC, None, 1), (SYNC, None, 3), (ASYNC, None, 1), (SSP, 9, 3)],
)
def test_a_server_that_comes_again_reads_what_others_have_loaded(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, mode: str, staleness: int | None,
    every: int,
) -> None:  # fmt: skip
    """It was lost with the worker, and has at most snapshots of before."""
    cluster = new_cluster(2, 2, updater=Added, every=every)
    first, second = saved_twos(cluster, mode, staleness)

    stop_before_load(cluster, monkeypatch, first.worker)
    kill_leader(cluster, monkeypatch, first.worker, 1)
    cluster.restart_server(1)
    again = Trainer(cluster.worker("worker 0", 0), mode, staleness)
    go_on(again, second)


def test_a_server_that_cannot_save_what_it_has_loaded_ends(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a snapshot of before it would come again with the old values, and nobody would know."""
    cluster, trainer = with_one(new_cluster, 1, 1, updater=Added, every=5)
    checkpoints.save(trainer.worker, cluster.folder / "saved")
    write = SnapshotFolder.write

    def fail(self: SnapshotFolder, saved: SavedTable, alone: bool = False) -> None:
        if alone:
            raise HorovodInternalError("the disk is full")
        write(self, saved)

    monkeypatch.setattr(SnapshotFolder, "write", fail)
    with pytest.raises(HorovodInternalError):
        checkpoints.load(trainer.worker, cluster.folder / "saved")
    cluster.servers[0].wait()
    assert "the disk is full" in str(cluster.servers[0].error)


def test_nobody_waits_for_a_table_that_nobody_has(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that comes again knows no table before a worker begins it; only one had it."""
    cluster, first, second = with_two(new_cluster, 2, 0, ASYNC, updater=Added, worker_seconds=1.0)
    values = [np.zeros(size) for size in SIZES]
    own = first.worker.declare("own", SPECS, TableOptions(ASYNC), lambda: values)
    own.pull(values)
    for trainer in (first, second):
        add_ones(trainer, lambda trainer=trainer: trainer.table.clock == 1)  # type: ignore[misc]
    checkpoints.save(first.worker, cluster.folder / "saved")
    for trainer in (first, second):
        add_ones(trainer, lambda trainer=trainer: trainer.table.clock == 3)  # type: ignore[misc]
    stop_before_load(cluster, monkeypatch, first.worker)
    kill_leader(cluster, monkeypatch, first.worker, 1)
    cluster.restart_server(1)
    add_ones(second, lambda: second.table.clock == 5)
    assert added_up(second) == {4.0}


def test_a_load_says_for_whom_it_waits(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who comes again does not declare a table, which no server begins again without it."""
    monkeypatch.setattr(changes, "WARNING_SECONDS", 0.05)
    cluster, trainer = with_one(new_cluster, 2, 0, ASYNC, updater=Added)
    values = [np.zeros(size) for size in SIZES]
    trainer.worker.declare("own", SPECS, TableOptions(ASYNC), lambda: values)
    add_ones(trainer, lambda: trainer.table.clock == 1)
    checkpoints.save(trainer.worker, cluster.folder / "saved")
    stop_before_load(cluster, monkeypatch, trainer.worker)
    kill_leader(cluster, monkeypatch, trainer.worker, 1)
    cluster.restart_server(1)
    again = Trainer(cluster.worker("worker 0", 0), ASYNC)
    wanted = "all workers wait for it: server 1 has not begun the table 'own'"
    wait_until(lambda: wanted in caplog.text)
    again.worker.declare("own", SPECS, TableOptions(ASYNC), lambda: values)
    add_ones(again, lambda: again.table.clock == 3)


def test_what_cannot_be_read_again_is_said_in_all_workers(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = new_cluster(2, 2, updater=Added)
    first, second = saved_twos(cluster, ASYNC)

    def lose() -> None:
        cluster.servers[1].end()
        shutil.rmtree(cluster.folder / "saved")

    stop_before_load(cluster, monkeypatch, first.worker)
    kill_leader(cluster, monkeypatch, first.worker, 1, lose)
    cluster.restart_server(1)
    with pytest.raises(HorovodInternalError, match=r"server 1 has come again while .*saved was lo"):
        add_ones(second, lambda: second.table.clock == 9)


def test_rows_are_loaded_without_who_leads(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = new_cluster(2, 1)
    options = TableOptions(ASYNC, None, rows=RowsSpec(30, 4, "float64", seed=3).fields)
    spec, ids = TensorSpec("rows", "float64", (30, 4)), np.arange(30)

    worker = cluster.worker("worker 0", 0)
    rows = worker.declare_rows(spec, options)
    rows.push(ids, np.ones((30, 4))).wait()
    saved = rows.pull(ids).wait()
    checkpoints.save(worker, cluster.folder / "saved")
    rows.push(ids, np.ones((30, 4))).wait()
    stop_before_load(cluster, monkeypatch, worker)
    kill_leader(cluster, monkeypatch, worker, 1)
    cluster.restart_server(1)
    again = cluster.worker("worker 0", 0).declare_rows(spec, options)
    np.testing.assert_array_equal(again.pull(ids).wait(), saved)
