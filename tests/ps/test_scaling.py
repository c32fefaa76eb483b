"""Servers and workers that come and go while others train."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.requests.handles import Handle
from hvdlite.ps.layouts.blocks import Array, TensorSpec
from hvdlite.ps.raw_calls import RawTable
from hvdlite.ps.scheduler import changes
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.server import running
from hvdlite.ps.tables.clocks import ASYNC, SSP, SYNC
from hvdlite.ps.tables.row_store import RowsSpec
from hvdlite.ps.worker import checkpoints, remote_rows
from hvdlite.ps.worker.remote_table import RemoteTable
from hvdlite.ps.worker.table_shards import Gate
from tests.ps.cluster import (
    Cluster,
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


class Adam:
    """Has slots for each element, and a number of steps for each block."""

    def begin(self, values: Sequence[Array]) -> None:
        self.arrays = list(values)
        self.slots = [[np.zeros_like(array), np.zeros_like(array)] for array in values]
        self.steps = [np.zeros((), np.float32) for _ in values]

    def values(self) -> list[Array]:
        return self.arrays

    def step(self, gradients: Sequence[Array], numbers: Sequence[Mapping[str, Any]]) -> None:
        for number, gradient in enumerate(gradients):
            mean, square = self.slots[number]
            self.steps[number] += 1
            mean[...] = 0.9 * mean + 0.1 * gradient
            square[...] = 0.999 * square + 0.001 * gradient * gradient
            rate = 0.01 / (1 - 0.9 ** float(self.steps[number]))
            self.arrays[number] -= rate * mean / (np.sqrt(square) + 1e-8)

    def state(self) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for number, (mean, square) in enumerate(self.slots):
            found |= {f"{number}.mean": mean, f"{number}.square": square}
            found[f"{number}.step"] = self.steps[number]
        return found

    def load(self, state: Mapping[str, Array]) -> None:
        for number, slots in enumerate(self.slots):
            slots[0][...], slots[1][...] = state[f"{number}.mean"], state[f"{number}.square"]
            self.steps[number] = state[f"{number}.step"].copy()


def loads(cluster: Cluster) -> list[int]:
    return cluster.state.registry.layout.loads()


def is_even(cluster: Cluster, servers: int) -> bool:
    found = loads(cluster)
    return len(found) == servers and max(found) - min(found) < 800  # bytes of the largest part


def train_to(trainer: Trainer, end: Sequence[int]) -> None:
    """Train until a step that somebody decides meanwhile."""
    while not end or trainer.table.clock < end[0]:
        trainer.train(trainer.table.clock + 1)


def both(_step: int) -> list[int]:
    return [0, 1]


@pytest.mark.parametrize("every", [0, 1])
def test_servers_come_and_go_and_sync_stays_bitwise_the_same(
    new_cluster: NewCluster, every: int
) -> None:
    cluster, first, second = with_two(new_cluster, 2, updater=Adam, every=every)
    layouts = cluster.state.registry
    end: list[int] = []

    def scale() -> None:
        cluster.servers.append(cluster.start_server(2, joins=True))
        wait_until(lambda: layouts.version == 2)
        assert is_even(cluster, 3)
        first.worker.scale_servers(1)
        wait_until(lambda: layouts.version == 3)
        for server in cluster.servers[1:]:
            server.wait()
        assert [server.error for server in cluster.servers] == [None] * 3
        cluster.servers[1] = cluster.start_server(1, joins=True)
        wait_until(lambda: layouts.version == 4)
        assert is_even(cluster, 2)
        end.append(first.table.clock + 5)

    in_threads(scale, lambda: train_to(first, end), lambda: train_to(second, end))
    assert bits(first.values) == bits(second.values) == train_in_one(end[0], both, Adam)


@pytest.mark.parametrize(("mode", "staleness"), [(ASYNC, None), (SSP, 2)])
def test_a_server_comes_while_workers_are_at_different_steps(
    new_cluster: NewCluster, mode: str, staleness: int | None
) -> None:
    """Nothing is applied twice and nothing is lost: the updates only add."""
    cluster, first, second = with_two(new_cluster, 1, 0, mode, staleness, updater=Added)
    scaled, ended = threading.Event(), threading.Event()

    def scale() -> None:
        wait_until(lambda: first.table.clock > 10)
        cluster.servers.append(cluster.start_server(1, joins=True))
        wait_until(lambda: is_even(cluster, 2))
        scaled.set()

    def train(trainer: Trainer, seconds: float, end: threading.Event) -> None:
        while not end.is_set():
            trainer.push_ones()
            trainer.table.pull(trainer.values)
            time.sleep(seconds)
        ended.set()  # Until now, it may have waited for the other one.

    in_threads(scale, lambda: train(first, 0.001, scaled), lambda: train(second, 0.003, ended))
    first.table.pull(first.values)
    steps = first.table.clock + second.table.clock
    for array in first.values:
        assert (array - np.arange(array.size) == steps).all()


class Added(Adam):
    """Adds what is pushed."""

    def step(self, gradients: Sequence[Array], numbers: Sequence[Mapping[str, Any]]) -> None:
        for number, gradient in enumerate(gradients):
            self.arrays[number] += gradient


def test_a_server_killed_while_others_move_begins_the_change_again(new_cluster: NewCluster) -> None:
    cluster, first, second = with_two(new_cluster, 2, 5, every=1)
    first.push()  # the border cannot be reached before the other one has pushed, too
    cluster.servers.append(cluster.start_server(2, joins=True))
    wait_until(lambda: (c := cluster.state.changes.current) is not None and c.borders is not None)
    identity = cluster.state.changes.current.identity  # type: ignore[union-attr]
    cluster.restart_server(0)
    wait_until(lambda: (c := cluster.state.changes.current) is None or c.identity != identity)

    def go_on(trainer: Trainer) -> None:
        trainer.table.pull(trainer.values)
        trainer.train(30)

    in_threads(lambda: go_on(first), lambda: second.train(30))
    wait_until(lambda: is_even(cluster, 3))
    assert bits(first.values) == bits(second.values) == train_in_one(30, both)


def test_a_scheduler_killed_while_servers_move_begins_the_change_again(
    new_cluster: NewCluster,
) -> None:
    cluster, first, second = with_two(new_cluster, 1, 5)
    first.push()
    cluster.servers.append(cluster.start_server(1, joins=True))
    wait_until(lambda: (c := cluster.state.changes.current) is not None and c.borders is not None)
    cluster.scheduler.end()
    cluster.start_scheduler()

    def go_on(trainer: Trainer) -> None:
        trainer.table.pull(trainer.values)
        trainer.train(30)

    in_threads(lambda: go_on(first), lambda: second.train(30))
    wait_until(lambda: is_even(cluster, 2))
    assert bits(first.values) == bits(second.values) == train_in_one(30, both)


def test_a_server_killed_after_a_change_goes_on_in_the_new_layout(new_cluster: NewCluster) -> None:
    cluster, trainer = with_one(new_cluster, 1, 5, every=1, updater=Adam)
    cluster.servers.append(cluster.start_server(1, joins=True))
    wait_until(lambda: is_even(cluster, 2))
    for number in (0, 1):
        cluster.restart_server(number)
    trainer.train(10)
    assert bits(trainer.values) == train_in_one(10, lambda _step: [0], Adam)


def test_rows_move_with_their_servers(new_cluster: NewCluster) -> None:
    cluster = new_cluster(2, 1)
    worker = cluster.worker("worker 0")
    spec = RowsSpec(30, 4, "float64", seed=3)
    tensor = TensorSpec("rows", "float64", (30, 4))
    rows = worker.declare_rows(tensor, TableOptions(SYNC, None, rows=spec.fields))
    every = np.arange(30)
    wanted = rows.pull(every).wait()
    cluster.servers.append(cluster.start_server(2, joins=True))
    version = 1
    for step in range(40):
        rows.push(every[: step + 1 if step < 30 else 30], np.ones((min(step + 1, 30), 4))).wait()
        wanted[: step + 1] += 1
        assert (rows.pull(every).wait() == wanted).all()
        version = cluster.state.registry.version
        if version == 2 and cluster.state.changes.wanted == 3:
            worker.scale_servers(1)
        time.sleep(0.01)
    wait_until(lambda: cluster.state.registry.version == 3)
    assert (rows.pull(every[::-1]).wait() == wanted[::-1]).all()


def test_a_number_of_servers_that_cannot_be_is_refused(new_cluster: NewCluster) -> None:
    _, trainer = with_one(new_cluster, 1)
    for count in (0, 2):
        with pytest.raises(HorovodInternalError, match=f"{count} servers cannot be left of 1"):
            trainer.worker.scale_servers(count)
    trainer.train(3)


def has_beaten(before: Mapping[Any, float], members: Mapping[Any, Any]) -> bool:
    return all(members[key].heard > heard for key, heard in before.items())


def lose_scheduler(cluster: Cluster) -> None:
    """Start a scheduler that knows nothing of its predecessor."""
    cluster.scheduler.end()
    (cluster.folder / "scheduler.json").unlink()
    cluster.start_scheduler()


def test_no_step_is_made_without_a_worker_that_a_new_scheduler_does_not_know_yet(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(2, 2)
    pair = trainers(cluster, 2)
    in_threads(*[partial(trainer.train, 5) for trainer in pair])
    goes_on = threading.Event()
    pair[1].worker._client.call(goes_on.wait)  # It is late with its hello.
    lose_scheduler(cluster)
    members = cluster.state.membership.members
    met = threading.Event()
    meets = threading.Thread(target=lambda: (pair[0].worker.barrier(), met.set()), daemon=True)
    meets.start()
    for _ in range(3):  # Beats, with whose answers the others hear who is there.
        wait_until(lambda: members.keys() >= {("server", 0), ("server", 1), ("worker", 0)})
        before = {key: member.heard for key, member in members.items()}
        wait_until(partial(has_beaten, before, members))
    assert not met.is_set()
    pair[0].push()
    goes_on.set()
    pair[1].worker.barrier()
    meets.join()
    in_threads(*[partial(trainer.train, 10) for trainer in pair])
    pair[0].table.pull(pair[0].values)
    assert [bits(trainer.values) for trainer in pair] == [train_in_one(10, both)] * 2


@pytest.mark.parametrize("joins", [True, False])
def test_servers_stay_where_a_scheduler_has_forgotten_their_tables(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    joins: bool,
) -> None:  # fmt: skip
    """It has come again without what was written down: it would move none of them."""
    monkeypatch.setattr(changes, "WARNING_SECONDS", 0.2)
    cluster = new_cluster(2, 2, updater=Adam)
    pair = trainers(cluster, 2)
    in_threads(*[partial(trainer.train, 5) for trainer in pair])
    lose_scheduler(cluster)
    wait_until(lambda: cluster.state.membership.formed)
    wait_until(lambda: sum(bool(e.tables) for e in cluster.state.changes.standings.values()) == 4)
    if joins:
        cluster.servers.append(cluster.start_server(2, joins=True))
        wait_until(lambda: "has not known the table 't' of server" in caplog.text)
    else:
        with pytest.raises(HorovodInternalError, match="has not known the table 't' of server"):
            pair[0].worker.scale_servers(1)
    in_threads(*[partial(trainer.train, 10) for trainer in pair])
    assert [bits(trainer.values) for trainer in pair] == [train_in_one(10, both, Adam)] * 2


@pytest.mark.parametrize("mode", [ASYNC, SYNC])
def test_a_worker_joins_and_takes_part(new_cluster: NewCluster, mode: str) -> None:
    cluster = new_cluster(2, 2)
    pair = trainers(cluster, 2, mode)
    end: list[int] = []

    def join() -> Trainer:
        wait_until(lambda: pair[0].table.clock >= 20)
        third = Trainer(cluster.worker("worker 2", joins=True), mode)
        begin = third.table.clock
        third.train(begin + 3)
        third.worker.leave()
        end.append(pair[0].table.clock + 5)
        return third

    third = in_threads(join, *[lambda t=trainer: train_to(t, end) for trainer in pair])[0]
    assert third.worker.number == 2
    if mode == SYNC:
        begin = third.table.clock - 3
        assert begin >= 20
        wanted = train_in_one(end[0], lambda s: [0, 1, 2] if begin <= s < begin + 3 else [0, 1])
        assert [bits(trainer.values) for trainer in pair] == [wanted] * 2


def test_whole_tensors_do_not_move_and_say_so(new_cluster: NewCluster) -> None:
    cluster = new_cluster(2, 1)
    worker = cluster.worker("worker 0")
    specs = [TensorSpec("a", "float64", (4,))]
    options = TableOptions(SYNC, None, part_bytes=None)
    worker.declare("whole", specs, options, lambda: [np.zeros(4)])
    with pytest.raises(HorovodInternalError, match="table 'whole' are whole"):
        worker.scale_servers(1)


def test_a_server_that_was_to_go_stays_where_the_next_layout_has_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "LAST_SECONDS", 0.0)
    news: dict[str, Any] = {"workers": [0], "layout_servers": 3, "change": None}
    end = running._end_of(Mock(), Mock(), Mock(), 2, news)
    assert not end()
    news |= {"layout_servers": 2, "change": {"servers": 4}}
    assert not end() and not end()
    news |= {"layout_servers": 4, "change": None}
    assert not end() and not end()
    news["layout_servers"] = 2
    end()
    assert end()


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["optimizer", "raw", "rows"])
def test_a_push_that_is_broken_off_holds_no_change_and_no_load_up(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, kind: str, error: type[BaseException]
) -> None:
    """Memory is missing, or the user ends it, when the gate has let it pass."""
    cluster = new_cluster(1, 1, updater=Added)
    worker, values = cluster.worker("worker 0", 0), [np.zeros(5000)]
    table: Any
    if kind == "rows":
        rows = RowsSpec(50, 2, "float64", initializer="zeros").fields
        spec = TensorSpec("t", "float64", (50, 2))
        table = worker.declare_rows(spec, TableOptions(ASYNC, average=False, rows=rows))
    else:
        specs, made = [TensorSpec("t", "float64", (5000,))], RawTable if kind == "raw" else None
        options = TableOptions(ASYNC, average=False, part_bytes=8000)
        table = worker.declare("t", specs, options, lambda: values, made or RemoteTable)

    def push() -> Handle:
        if kind == "rows":
            return table.push(np.arange(50), np.ones((50, 2)))  # type: ignore[no-any-return]
        ones = np.ones(5000)
        return table.push_async(ones) if kind == "raw" else table.push([ones], {})  # type: ignore[no-any-return]

    def pull() -> set[float]:
        if kind == "rows":
            return set(table.pull(np.arange(50)).wait().reshape(-1).tolist())
        if kind == "raw":
            return set(table.pull_async().wait().tolist())
        table.pull(values)
        return set(values[0].tolist())

    def break_off(*_: Any) -> Any:
        raise error

    push().wait()
    with monkeypatch.context() as patched:
        patched.setattr(remote_rows, "_of_servers", break_off)
        patched.setattr(RemoteTable, "_cut", break_off)
        with pytest.raises(error):
            push()
    checkpoints.save(worker, cluster.folder / "saved")
    in_threads(lambda: checkpoints.load(worker, cluster.folder / "saved"))
    server = cluster.start_server(1, joins=True)
    cluster.servers.append(server)
    wait_until(lambda: cluster.state.registry.layout.num_servers == 2)
    push().wait()
    assert pull() == {2.0}


@pytest.mark.parametrize("sizes", [(300, 7), (300, 7, 40, 1), (300, 8, 40), (300, 7, 39)])
def test_gradients_that_are_not_those_of_the_table_are_refused_before_they_count(
    new_cluster: NewCluster, sizes: Sequence[int]
) -> None:
    _, trainer = with_one(new_cluster, 2, 2)
    wanted = rf"of \[{', '.join(map(str, sizes))}\] elements .* 't', whose .* \[300, 7, 40\]"
    with pytest.raises(ValueError, match=wanted):
        trainer.table.push([np.ones(size) for size in sizes], {})
    trainer.train(4)
    assert bits(trainer.values) == train_in_one(4, lambda _: [0])


def test_a_push_that_is_taken_back_is_no_step_before_the_border() -> None:
    """One that passes after it is the step that it would have been."""
    gate = Gate(lambda: 3, lambda: False)
    gate.let_pass("3")
    gate.let_pass("4")
    gate.take_back("4")
    gate.take_back("4")
    gate.set_border(5)
    gate.let_pass("4 again")
    quiet = list[int]()
    gate.close(quiet.append)
    gate.take_back("5")  # It has not passed yet.
    gate.answered("3")
    assert not quiet
    gate.take_back("4 again")
    assert quiet == [3]
