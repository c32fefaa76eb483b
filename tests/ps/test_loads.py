"""Tables are loaded while others train, and servers are lost later.

A push counts on all servers, or on none of them. Where there are no snapshots, no value from before
the load comes again: workers that have pulled since have what was loaded; where none has, all of
them hear that it is lost.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.ps.connections.messages import Message
from hvdlite.ps.layouts.blocks import TensorSpec
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.server import saved_files
from hvdlite.ps.server.checkpoints import ServerCheckpoints
from hvdlite.ps.tables.clocks import ASYNC, SSP, SYNC
from hvdlite.ps.tables.row_store import RowsSpec
from hvdlite.ps.worker import checkpoints
from hvdlite.ps.worker.shard import PsRolledBack, Shard
from hvdlite.ps.worker.worker import Worker
from tests.ps.cluster import (
    LIMIT_SECONDS,
    SIZES,
    Cluster,
    NewCluster,
    Trainer,
    in_threads,
    trainers,
    wait_until,
    with_two,
)
from tests.ps.test_layout_changes import add_ones, added_up
from tests.ps.test_scaling import Added


def add_ones_once(trainer: Trainer, mode: str) -> None:
    if mode == SYNC:  # Else the other worker needs nothing of it.
        add_ones(trainer, lambda: trainer.table.clock == 1)


def push_sevens_to_server_0(trainer: Trainer) -> None:
    shard, ended = trainer.table._shards[0], threading.Event()
    payloads = trainer.table._cut([np.full(size, 7.0) for size in SIZES], 0)
    trainer.worker._client.call(lambda: shard.push({}, payloads, lambda _: ended.set()))
    assert ended.wait(LIMIT_SECONDS)


@pytest.mark.parametrize(
    ("mode", "staleness", "comes"),
    [
        (SYNC, None, "before the load"), (SYNC, None, "after the load"),
        (SYNC, None, "and steps before"), (ASYNC, None, "before the load"),
        (ASYNC, None, "and steps before"), (SSP, 1, "after the load"),
    ],
)  # fmt: skip
def test_a_worker_makes_a_step_again_that_one_server_had_before_a_load(
    new_cluster: NewCluster, mode: str, staleness: int | None, comes: str
) -> None:
    """Another worker leads the load; the push of the process before counts nowhere any more."""
    cluster, first, second = with_two(new_cluster, 2, 0, mode, staleness, updater=Added)
    checkpoints.save(first.worker, cluster.folder / "saved")
    push_sevens_to_server_0(second)
    second.worker.close()

    def come_again() -> Trainer:
        return Trainer(cluster.worker("worker 1", 1), mode, staleness)

    if comes != "after the load":
        again = come_again()
        if comes == "and steps before":  # The other server has a push of the same step by now.
            again.table.push([np.full(size, 9.0) for size in SIZES], {}).wait()
        checkpoints.load(first.worker, cluster.folder / "saved")
    else:  # Its process is there, and has no table yet.
        worker = cluster.worker("worker 1", 1)
        checkpoints.load(first.worker, cluster.folder / "saved")
        again = Trainer(worker, mode, staleness)
    if comes == "and steps before":
        assert again.table.clock == 1
        in_threads(partial(again.table.pull, again.values), partial(add_ones_once, first, mode))
        nine = (9.0 + 1.0) / 2 if mode == SYNC else 0.0  # In sync it is sent again to both.
        first.table.pull(first.values)
        assert added_up(first) == {nine}
        return
    assert again.table.clock == 0
    in_threads(*[lambda t=each: add_ones(t, lambda: t.table.clock == 3) for each in (first, again)])
    first.table.pull(first.values)
    assert added_up(first) == {3.0 if mode == SYNC else 6.0}


@pytest.mark.parametrize(("mode", "staleness"), [(ASYNC, None), (SSP, 9)])
def test_each_worker_counts_on_from_the_step_that_was_saved(
    new_cluster: NewCluster, mode: str, staleness: int | None
) -> None:
    """They have made other numbers of steps, of which schedules must not see any."""
    cluster = new_cluster(2, 3, updater=Added)
    folder = cluster.folder / "saved"
    group = trainers(cluster, 3, mode, staleness)
    first, second, third = group

    def counts() -> list[int]:
        return [each.table.clock + each.table.steps_before for each in group]

    add_ones(first, lambda: first.table.clock == 2)
    checkpoints.save(first.worker, folder)
    add_ones(second, lambda: second.table.clock == 6)
    add_ones(third, lambda: third.table.clock == 1)
    assert checkpoints.load(third.worker, folder) == 1
    add_ones(second, lambda: second.table.clock == 7)
    assert [checkpoints.load(each.worker, folder) for each in (first, second)] == [0, -4]
    assert counts() == [2, 3, 2]
    second.worker.close()
    group[1] = Trainer(cluster.worker("worker 1", 1), mode, staleness)
    checkpoints.load(group[1].worker, folder)
    assert counts() == [2, 3, 2]


@pytest.mark.parametrize(
    ("mode", "staleness", "restarts"), [(ASYNC, None, False), (ASYNC, None, True), (SSP, 1, True)]
)
def test_a_push_amid_a_load_counts_on_all_servers(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, mode: str, staleness: int | None,
    restarts: bool,
) -> None:  # fmt: skip
    """One server has loaded, and the other one not yet; the scheduler may come again meanwhile."""
    cluster, first, second = with_two(new_cluster, 2, 0, mode, staleness, updater=Added)
    checkpoints.save(first.worker, cluster.folder / "saved")
    ones = [np.ones(size) for size in SIZES]
    pushed = threading.Thread(target=lambda: second.table.push(ones, {}).wait())
    ask, gate = Worker.ask_servers, second.table.gate

    def ask_in_turn(worker: Worker, servers: int, message: Message) -> list[Message]:
        if message.body.get("phase") != "apply" or pushed.ident is not None:
            return ask(worker, servers, message)  # A new scheduler lets all load once more.
        answers = ask(worker, 1, message)
        if restarts:
            cluster.scheduler.end()
            cluster.start_scheduler()
            second.worker.ask(Message("declare", 0, "t"))  # It has heard of the new one.
        pushed.start()
        # It waits for the end of the load, or is made on both servers.
        wait_until(lambda: gate._border is not None or not pushed.is_alive())
        return [*answers, *ask(worker, servers, message)[1:]]

    monkeypatch.setattr(Worker, "ask_servers", ask_in_turn)
    checkpoints.load(first.worker, cluster.folder / "saved")
    pushed.join(LIMIT_SECONDS)
    assert not pushed.is_alive()
    first.table.pull(first.values)
    assert added_up(first) == {1.0}


def test_a_push_that_is_sent_again_does_not_come_after_the_load(new_cluster: NewCluster) -> None:
    """One server has it, and to the other one it is on its way: the load undoes it on both."""
    cluster, first, second = with_two(new_cluster, 2, 0, SSP, 3, updater=Added)
    checkpoints.save(first.worker, cluster.folder / "saved")
    connection = second.worker._servers[1]._connection
    assert connection is not None
    caller, gate, loaded = connection.caller, second.table.gate, threading.Event()
    send = caller.send

    def send_late(message: Message) -> None:
        if message.kind != "push" or gate._border is not None or loaded.is_set():
            send(message)

    caller.send = send_late  # type: ignore[method-assign]
    pushed = second.table.push([np.ones(size) for size in SIZES], {})
    checkpoints.load(first.worker, cluster.folder / "saved")
    loaded.set()  # From now on the push may come.
    pushed.wait()
    first.table.pull(first.values)
    assert added_up(first) == {0.0}
    add_ones(second, lambda: second.table.clock == 3)
    assert added_up(second) == {2.0}


def test_others_go_on_where_the_worker_that_loads_is_lost(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, first, second = with_two(new_cluster, 1, 0, ASYNC, updater=Added, worker_seconds=1.0)
    checkpoints.save(first.worker, cluster.folder / "saved")
    begun, ended = threading.Event(), threading.Event()

    def stand_still(*_: Any) -> Any:
        begun.set()
        ended.wait(LIMIT_SECONDS)
        raise RuntimeError("it was killed")

    monkeypatch.setattr(checkpoints._Phases, "load", stand_still)

    def load_in_vain() -> None:
        with suppress(Exception):
            checkpoints.load(first.worker, cluster.folder / "saved")

    load = threading.Thread(target=load_in_vain)
    load.start()
    assert begun.wait(LIMIT_SECONDS)
    first.worker.close()
    add_ones(second, lambda: second.table.clock == 3)
    assert added_up(second) == {3.0}
    ended.set()
    load.join(LIMIT_SECONDS)


# -- a server is lost after a load


CASES = pytest.mark.parametrize(  # The scheduler may come again after the load.
    ("mode", "staleness", "restarts"),
    [(SYNC, None, True), (SYNC, None, False), (ASYNC, None, True), (SSP, 1, False)],
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


@CASES
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


@CASES
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


def two_saves(trainer: Trainer, cluster: Cluster) -> Callable[[], None]:
    """Save 1 in each element as "saved", and return what puts a later save, of 3, in its place."""
    folder = cluster.folder
    for count, name in ((1, "saved"), (2, "later")):
        trainer.table.push([np.full(size, float(count)) for size in SIZES], {}).wait()
        checkpoints.save(trainer.worker, folder / name)

    def replace() -> None:
        if (folder / "later").exists():
            os.rename(folder / "saved", folder / "old")
            os.rename(folder / "later", folder / "saved")

    return replace


@pytest.mark.parametrize("between", ["servers", "files"])
def test_a_save_of_another_job_amid_a_load_does_not_mix_with_it(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    cluster = new_cluster(2, 1, updater=Added)
    (trainer,) = trainers(cluster, 1, ASYNC)
    replace = two_saves(trainer, cluster)
    read_tables, read_file = ServerCheckpoints._read_tables, saved_files.read
    first_has_read = threading.Event()

    def read_after_the_other(server: ServerCheckpoints, *words: Any) -> Any:
        if server._number == 0:
            found = read_tables(server, *words)
            first_has_read.set()
            return found
        assert first_has_read.wait(LIMIT_SECONDS)
        replace()
        return read_tables(server, *words)

    def read_and_replace(path: Path, *, verify: bool = True) -> Any:
        found = read_file(path, verify=verify)
        if verify and ".00000-of-" in path.name:  # Server 0 has its part, and reads on.
            replace()
        return found

    if between == "servers":
        monkeypatch.setattr(ServerCheckpoints, "_read_tables", read_after_the_other)
    else:
        monkeypatch.setattr(saved_files, "read", read_and_replace)
    checkpoints.load(trainer.worker, cluster.folder / "saved")
    trainer.table.pull(trainer.values)
    assert added_up(trainer) == {3.0}


def test_servers_that_see_different_folders_load_nothing(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where each host has a disk of its own under that name."""
    cluster = new_cluster(2, 1, updater=Added)
    (trainer,) = trainers(cluster, 1, ASYNC)
    two_saves(trainer, cluster)
    read_tables = ServerCheckpoints._read_tables

    def read_own(server: ServerCheckpoints, directory: str, *words: Any) -> Any:
        own = str(cluster.folder / "later") if server._number else directory
        return read_tables(server, own, *words)

    monkeypatch.setattr(ServerCheckpoints, "_read_tables", read_own)
    monkeypatch.setattr(checkpoints, "LOOK_SECONDS", 0.0)
    with pytest.raises(ValueError, match=r"servers read different checkpoints from .*saved"):
        checkpoints.load(trainer.worker, cluster.folder / "saved")
    trainer.table.pull(trainer.values)
    assert added_up(trainer) == {3.0}


def test_a_server_that_comes_amid_a_load_does_not_take_a_later_checkpoint(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the others have loaded is nowhere any more: that is said."""
    cluster = new_cluster(2, 1, updater=Added)
    (trainer,) = trainers(cluster, 1, ASYNC)
    replace, ask = two_saves(trainer, cluster), Worker.ask

    def lose(worker: Worker, message: Message) -> Message:
        if message.kind == "over" and message.body["load"] and (cluster.folder / "later").exists():
            cluster.servers[1].end()
            replace()
            before = cluster.state.membership.members["server", 1].incarnation
            cluster.restart_server(1)
            members = cluster.state.membership.members
            wait_until(lambda: members["server", 1].incarnation > before)
        return ask(worker, message)

    monkeypatch.setattr(Worker, "ask", lose)
    with pytest.raises(HorovodInternalError, match="there is another checkpoint now"):
        checkpoints.load(trainer.worker, cluster.folder / "saved")
