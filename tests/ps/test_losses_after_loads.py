"""A server is lost after a load, and there are no snapshots: no value from before it comes again.

Workers that have pulled since the load have what was loaded; where none has, all of them hear that
it is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.ps.connections.messages import Message
from hvdlite.ps.layouts.blocks import TensorSpec
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.clocks import ASYNC, SSP, SYNC
from hvdlite.ps.tables.row_store import RowsSpec
from hvdlite.ps.worker import checkpoints
from hvdlite.ps.worker.shard import PsRolledBack, Shard
from hvdlite.ps.worker.worker import Worker
from tests.ps.cluster import Cluster, Trainer, in_threads, trainers, wait_until
from tests.ps.test_layout_changes import add_ones, added_up
from tests.ps.test_scaling import Added

NewCluster = Callable[..., Cluster]
MODES = pytest.mark.parametrize(
    ("mode", "staleness"), [(SYNC, None), (ASYNC, None), (SSP, 1)], ids=["sync", "async", "ssp"]
)


def saved_twos(cluster: Cluster, *mode: Any) -> list[Trainer]:
    """Return two workers that have saved 2 added to each element, and pushed more since."""
    pair = trainers(cluster, 2, *mode)
    steps = 2 if mode[0] == SYNC else 1  # In sync, the average of both counts.
    in_threads(*[partial(add_ones, t, lambda t=t: t.table.clock == steps) for t in pair])
    checkpoints.save(pair[0].worker, cluster.folder / "saved")
    in_threads(*[partial(add_ones, t, lambda t=t: t.table.clock == steps + 3) for t in pair])
    return pair


def raises_lost(trainer: Trainer) -> None:
    with pytest.raises(HorovodInternalError, match=r"server 0 .*the table 't' had version \d"):
        trainer.table.pull(trainer.values)


@pytest.mark.parametrize("restarts", [False, True])
@MODES
def test_what_nobody_has_pulled_since_is_lost_in_all_workers(
    new_cluster: NewCluster, mode: str, staleness: int | None, restarts: bool
) -> None:
    cluster = new_cluster(2, 2, updater=Added)
    pair = saved_twos(cluster, mode, staleness)
    checkpoints.load(pair[0].worker, cluster.folder / "saved")
    if restarts:
        cluster.scheduler.end()
        cluster.start_scheduler()
    cluster.restart_server(0)
    in_threads(*[partial(raises_lost, trainer) for trainer in pair])


@pytest.mark.parametrize("restarts", [False, True])
@MODES
def test_what_one_worker_has_pulled_since_is_there_again(
    new_cluster: NewCluster, mode: str, staleness: int | None, restarts: bool
) -> None:
    """It has the same version as the other one, which pulled it before the load."""
    cluster = new_cluster(2, 2, updater=Added)
    first, second = saved_twos(cluster, mode, staleness)
    checkpoints.load(first.worker, cluster.folder / "saved")
    second.table.pull(second.values)
    assert added_up(second) == {2.0}
    if restarts:
        cluster.scheduler.end()
        cluster.start_scheduler()
    cluster.restart_server(0)
    in_threads(*[partial(trainer.table.pull, trainer.values) for trainer in (first, second)])
    assert added_up(first) == added_up(second) == {2.0}


def test_a_load_before_the_first_step_is_no_first_value(new_cluster: NewCluster) -> None:
    cluster = new_cluster(2, 2, updater=Added)
    saved_twos(cluster, ASYNC)
    later = new_cluster(2, 2, updater=Added, folder="later")
    pair = trainers(later, 2, ASYNC)
    checkpoints.load(pair[0].worker, cluster.folder / "saved")
    later.restart_server(0)
    in_threads(*[partial(raises_lost, trainer) for trainer in pair])


def test_rows_that_were_loaded_do_not_begin_anew(new_cluster: NewCluster) -> None:
    def rows_of(cluster: Cluster) -> Any:
        options = TableOptions(ASYNC, None, rows=RowsSpec(30, 4, "float64", seed=3).fields)
        worker = cluster.worker("worker 0")
        return worker, worker.declare_rows(TensorSpec("rows", "float64", (30, 4)), options)

    cluster, later = new_cluster(1, 1), new_cluster(1, 1, folder="later")
    worker, rows = rows_of(cluster)
    rows.push(np.arange(30), np.ones((30, 4))).wait()
    checkpoints.save(worker, cluster.folder / "saved")
    worker, rows = rows_of(later)
    checkpoints.load(worker, cluster.folder / "saved")
    later.restart_server(0)
    with pytest.raises(HorovodInternalError, match="the table 'rows' had version 0"):
        rows.pull(np.arange(30)).wait()


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("comes", ["amid the load", "after the load"])
def test_a_server_that_is_lost_when_it_has_loaded_has_what_was_loaded(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, lost: int, comes: str
) -> None:
    """Nobody has heard of the load yet. It is made again, or what is lost is said."""
    cluster = new_cluster(2, 2, updater=Added)
    pair = saved_twos(cluster, ASYNC)
    ask, left = Worker.ask, [lost]

    def lose(worker: Worker, message: Message) -> Message:
        answer = ask(worker, message) if comes == "after the load" else None
        if message.kind == "over" and left and (answer is None or answer.body["over"]):
            server = left.pop()
            cluster.servers[server].end()
            if comes == "amid the load":
                before = cluster.state.membership.members["server", server].incarnation
                cluster.restart_server(server)
                members = cluster.state.membership.members
                wait_until(lambda: members["server", server].incarnation > before)
        return answer or ask(worker, message)

    monkeypatch.setattr(Worker, "ask", lose)
    checkpoints.load(pair[0].worker, cluster.folder / "saved")
    if comes == "amid the load":
        in_threads(*[partial(trainer.table.pull, trainer.values) for trainer in pair])
        assert [added_up(trainer) for trainer in pair] == [{2.0}] * 2
    else:
        cluster.restart_server(lost)
        for trainer in pair:
            with pytest.raises(HorovodInternalError, match=rf"server {lost} .*the table 't' had"):
                trainer.table.pull(trainer.values)


def snapshots_of(cluster: Cluster, server: int) -> list[str]:
    folder = cluster.folder / "snapshots" / f"server-{server}"
    return sorted(path.stem for path in folder.glob("t/*.safetensors"))


def test_no_server_goes_back_to_a_snapshot_of_before(new_cluster: NewCluster) -> None:
    """It would have the values that the load undid, and others those that were loaded."""
    cluster = new_cluster(1, 2, updater=Added, every=3)
    pair = saved_twos(cluster, SYNC)
    before = ["000001-000000000000", "000001-000000000003"]
    wait_until(lambda: snapshots_of(cluster, 0) == before)  # A thread writes it.
    checkpoints.load(pair[0].worker, cluster.folder / "saved")
    assert snapshots_of(cluster, 0) == ["000001-000000000005"]
    for trainer in pair:
        back = partial(trainer.table._shards[0].go_back, PsRolledBack("it was lost", 3))
        trainer.worker._client.call(back)
    for trainer in pair:
        trainer.table.pull(trainer.values)
        assert added_up(trainer) == {2.0}


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_a_snapshot_that_is_removed_has_none_of_before(new_cluster: NewCluster, mode: str) -> None:
    """One that is damaged is to be removed, then the one before it counts."""
    cluster = new_cluster(2, 2, updater=Added, every=3)
    first, second = saved_twos(cluster, mode, None)
    checkpoints.load(first.worker, cluster.folder / "saved")
    cluster.servers[0].end()
    (only,) = snapshots_of(cluster, 0)
    (cluster.folder / "snapshots" / "server-0" / "t" / f"{only}.safetensors").unlink()
    cluster.servers[0] = cluster.start_server(0)
    in_threads(partial(raises_lost, first), partial(raises_lost, second))


@pytest.mark.parametrize("servers", [1, 3])
def test_servers_that_come_and_go_since_know_of_the_load(
    new_cluster: NewCluster, servers: int
) -> None:
    """Values that a worker has pulled from other servers are offered to those of now."""
    cluster = new_cluster(2, 2, updater=Added)
    first, second = saved_twos(cluster, ASYNC)
    checkpoints.load(first.worker, cluster.folder / "saved")
    second.table.pull(second.values)
    if servers == 3:
        cluster.servers.append(cluster.start_server(2, joins=True))
    else:
        first.worker.scale_servers(1)
    wait_until(lambda: {t.table.place for t in (first, second)} == {(2, servers)})
    for _ in range(2):  # The second time, what was pulled of these servers is offered.
        cluster.restart_server(0)
        in_threads(*[partial(trainer.table.pull, trainer.values) for trainer in (first, second)])
        assert added_up(first) == added_up(second) == {2.0}


def test_a_server_that_comes_amid_a_load_knows_of_it(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = new_cluster(2, 2, updater=Added)
    pair = saved_twos(cluster, ASYNC)
    ask = Worker.ask

    def let_come(worker: Worker, message: Message) -> Message:
        if message.kind == "over" and len(cluster.servers) == 2:
            cluster.servers.append(cluster.start_server(2, joins=True))
            wait_until(lambda: ("server", 2) in cluster.state.membership.members)
        return ask(worker, message)

    monkeypatch.setattr(Worker, "ask", let_come)
    checkpoints.load(pair[0].worker, cluster.folder / "saved")
    wait_until(lambda: {trainer.table.place for trainer in pair} == {(2, 3)})
    for _ in range(2):
        in_threads(*[partial(trainer.table.pull, trainer.values) for trainer in pair])
        assert [added_up(trainer) for trainer in pair] == [{2.0}] * 2
        cluster.restart_server(2)


def test_a_worker_that_has_not_heard_of_all_servers_believes_the_last_word_of_each() -> None:
    """A load undoes what one server had said before, and that server comes again after it."""
    sent: list[Message] = []

    def send(message: Message) -> int:
        sent.append(message)
        return len(sent)

    shard = Shard("t", 0, 0, {}, list, send)
    shard.start(lambda _answer: None)
    shard.receive(Message("started", 1, "t", 0, body={"clock": 2}))
    shard.come_again()
    assert "clock" not in sent[-1].body
    shard.receive(Message("started", 2, "t", 0, body={"clock": 1}))
    assert shard.clock == 1
    shard.stand_at(shard.clock)
    shard.come_again()
    assert sent[-1].body["clock"] == 1
