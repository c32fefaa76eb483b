"""Rows on servers: where they are, what they begin with, and what pushes make of them."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hvdlite.ps.connections.messages import Message
from hvdlite.ps.layouts.blocks import Array, TensorSpec
from hvdlite.ps.scheduler.registry import Registry, TableOptions
from hvdlite.ps.tables import row_store
from hvdlite.ps.tables.clocks import ASYNC, SYNC, Mode
from hvdlite.ps.tables.description import TableDescription, describe_table
from hvdlite.ps.tables.row_store import RowShare, RowsSpec, RowStore, first_rows
from hvdlite.ps.tables.row_table import AddedRows, RowTable, add_rows, merge_repeated
from hvdlite.ps.worker.remote_rows import RemoteRows
from tests.ps.cluster import Cluster, NewCluster, in_threads

SPEC = RowsSpec(50, 3, "float64", seed=7)
IDS = np.array([1, 2, 5, 7])


def test_first_values_depend_on_seed_name_and_row_alone() -> None:
    every = first_rows(SPEC, "e", np.arange(50))
    for ids in ([49], [3, 4, 0], range(1, 50, 7)):
        assert first_rows(SPEC, "e", np.array([*ids])).tolist() == every[[*ids]].tolist()
    assert (every != first_rows(SPEC, "f", np.arange(50))).all()
    assert (every != first_rows(RowsSpec(50, 3, "float64", seed=8), "e", np.arange(50))).all()
    assert len(np.unique(every)) == 150


def test_first_values_are_spread_as_asked_for() -> None:
    spec = RowsSpec(2**40, 8, initializer="normal", scale=0.5, zero_row=2**39)
    normal = first_rows(spec, "e", np.arange(2**39, 2**39 + 20000))
    assert not normal[0].any() and normal[1:].all()
    assert abs(normal.mean()) < 0.005 and abs(normal.std() - 0.5) < 0.005
    assert abs((np.abs(normal) < 0.5).mean() - 0.6827) < 0.005
    uniform = first_rows(RowsSpec(9999, 8, initializer="uniform", scale=2), "e", np.arange(9999))
    assert abs(uniform.mean()) < 0.02 and 1.99 < np.abs(uniform).max() <= 2
    assert abs(uniform.std() - 2 / 3**0.5) < 0.02


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((0, 3), "count of rows is 0"),
        ((3, True), "length of rows is True"),
        ((3, 3, "int32"), "rows of int32"),
        ((3, 3, "float32", 1.5), "seed of rows is 1.5"),
        ((3, 3, "float32", 2**63), "the seed of rows is"),  # It goes in messages.
        ((3, 3, "float32", 1, "ones"), "initializer is 'ones'"),
        ((3, 3, "float32", 1, "uniform", -1.0), "the scale of rows is"),
        ((3, 3, "float32", 1, "uniform", float("nan")), "the scale of rows is"),
    ],
)
def test_what_rows_cannot_be(words: Any, wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        RowsSpec(*words)
    assert RowsSpec(5, 2, seed=-(2**63), scale=0.0).fields


def test_a_store_makes_rows_once_and_keeps_what_belongs_to_them() -> None:
    store = RowStore("e", RowsSpec(1000, 2))
    first = store.places(np.array([3, 7]))
    store.add_slot("m", 0.5, np.dtype(np.float32))
    store.values[first] = 9
    store.slots["m"][first] = [[1, 2], [3, 4]]
    ids = np.arange(3, 1000, 4)
    places = store.places(ids)
    assert len(store) == 250 and sorted(store.ids) == ids.tolist()
    assert store.values[places[:2]].tolist() == [[9, 9]] * 2
    assert store.values[places[2:]].tolist() == first_rows(store.spec, "e", ids[2:]).tolist()
    assert store.slots["m"][places[:3]].tolist() == [[1, 2], [3, 4], [0.5, 0.5]]
    other = RowStore("e", store.spec)
    other.load(store.ids, store.values, store.slots)
    assert other.slots["m"][other.places(np.array([7]))].tolist() == [[3, 4]]


def test_repeated_rows_are_added_in_their_order() -> None:
    ids = np.array([5, 2, 5, 5])
    rows = np.array([[1.0], [2.0], [2.0**60], [-(2.0**60)]])
    unique, merged = merge_repeated(ids, rows)
    assert (unique.tolist(), merged.tolist()) == ([2, 5], [[2.0], [0.0]])  # 1 is lost in 2^60
    short = np.full((5, 1), 256, ml_dtypes.bfloat16)
    short[1:] = 1
    assert merge_repeated(np.zeros(5, np.int64), short)[1].tolist() == [[260]]


def test_workers_rows_are_added_in_their_order() -> None:
    terms = [
        [np.array([1, 4]), np.array([[1.0], [3.0]])],
        [np.array([4, 6]), np.array([[2.0**60], [5.0]])],
        [np.array([4]), np.array([[-(2.0**60)]])],
    ]
    ids, total = add_rows(terms, average=False)
    assert (ids.tolist(), total.tolist()) == ([1, 4, 6], [[1.0], [0.0], [5.0]])
    assert add_rows(terms[:2], average=True)[1].tolist() == [[0.5], [2.0**59], [2.5]]


def test_a_server_that_returns_has_the_rows_of_the_step_before() -> None:
    """Another server lacks that step, so that a worker which comes again makes it again."""
    share = RowShare(SPEC, 0, 1)
    body = describe_table([], [], Mode(SYNC), average=False, rows=share)

    def new_table() -> RowTable:
        described = TableDescription("r", body)
        return RowTable(described, AddedRows(RowStore("r", SPEC)), incarnation=1)

    def start(table: RowTable) -> None:
        table.start(b"w", 0, Message("start", body={"worker": 0}), [0])

    def pulled_from(table: RowTable, clock: int) -> Array:
        (answer,) = table.pull(b"w", 0, Message("pull", clock=clock, payloads=[IDS.tobytes()]))
        return np.frombuffer(answer.message.payloads[0]).reshape(-1, SPEC.length)

    first, saved, wanted = new_table(), [], []
    start(first)
    for step, ids in enumerate([[1, 2], [2, 5]]):
        rows = np.full((2, SPEC.length), step + 1.0)
        payloads = [np.array(ids).tobytes(), rows.tobytes()]
        first.push(b"w", 0, Message("push", clock=step, payloads=payloads))
        saved.append(first.copy())
        wanted.append(pulled_from(first, step + 1))
    table = new_table()
    table.restore(saved[1])
    table.remember(saved[0])
    start(table)
    np.testing.assert_array_equal(pulled_from(table, 1), wanted[0])
    np.testing.assert_array_equal(pulled_from(table, 2), wanted[1])


@pytest.mark.parametrize("mode", [Mode(SYNC), Mode(ASYNC)])
@pytest.mark.parametrize("fails", ["begin", "step"])
def test_an_optimizer_of_rows_that_fails_is_said(
    monkeypatch: pytest.MonkeyPatch, mode: Mode, fails: str
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("it divides by 0")

    body = describe_table([], [], mode, average=False, rows=RowShare(SPEC, 0, 1))
    rows = AddedRows(RowStore("r", SPEC))
    monkeypatch.setattr(rows, fails, fail)
    table = RowTable(TableDescription("r", body), rows, incarnation=1)
    payloads = [IDS.tobytes(), np.ones((len(IDS), SPEC.length)).tobytes()]
    asked = {
        "start": lambda: table.start(b"w", 0, Message("start", body={"worker": 0}), [0]),
        "push": lambda: table.push(b"w", 0, Message("push", payloads=payloads)),
        "pull": lambda: table.pull(b"w", 0, Message("pull", clock=1, payloads=[IDS.tobytes()])),
    }
    words = {kind: ask()[-1].message.body.get("why", "") for kind, ask in asked.items()}
    said = {kind for kind, each in words.items() if "divides by 0" in each}
    assert said == ({"start"} if fails == "begin" else {"push", "pull"})
    assert table.look([]) == []


def test_rows_that_memory_is_missing_for_are_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    grown, every, missing = row_store._grown, np.arange(50), [False, True]

    def grow(array: Array, capacity: int) -> Array:
        if missing and missing.pop(0):
            raise MemoryError
        return grown(array, capacity)

    monkeypatch.setattr(row_store, "_FIRST_CAPACITY", 4)
    monkeypatch.setattr(row_store, "_grown", grow)
    store = RowStore("e", SPEC)
    with pytest.raises(MemoryError):
        store.places(every)
    assert (len(store), store.places(every).tolist()) == (0, every.tolist())
    np.testing.assert_array_equal(store.values, first_rows(SPEC, "e", every))


def rows_in(cluster: Cluster, number: int, mode: str = "sync", **words: Any) -> RemoteRows:
    """Let a worker come with a table of rows, to which pushes are added."""
    options = TableOptions(mode, average=False, rows=SPEC.fields, **words)
    spec = TensorSpec("e", "float64", (50, 3))
    return cluster.worker(f"worker {number}", number).declare_rows(spec, options)


def pulled(rows: RemoteRows, ids: Any) -> Array:
    handle = rows.pull(ids)
    assert handle.ended_within(30)
    found: Array = handle.wait()
    return found


def pushes(step: int, worker: int) -> tuple[Array, Array]:
    made = np.random.default_rng([step, worker])
    ids = made.integers(0, 50, made.integers(0, 12))
    return ids, made.normal(size=(len(ids), 3))


def added_in_one(steps: int, workers: int) -> Array:
    every = first_rows(SPEC, "e", np.arange(50))
    for step in range(steps):
        total = np.zeros_like(every)
        for worker in range(workers):
            own = np.zeros_like(every)
            for row, gradient in zip(*pushes(step, worker), strict=True):
                own[row] += gradient
            total += own
        every += total
    return every


@pytest.mark.parametrize("servers", [1, 3])
def test_sync_rows_are_bitwise_those_of_one_process(new_cluster: NewCluster, servers: int) -> None:
    kept: list[AddedRows] = []

    def updater_of(described: Any) -> AddedRows:
        kept.append(AddedRows(RowStore(described.name, described.rows.spec)))
        return kept[-1]

    cluster = new_cluster(servers, 2, updater_of=updater_of)

    def main(number: int) -> None:
        rows = rows_in(cluster, number)
        for step in range(10):
            ids = np.array([49, 3, 3, 20 + number])
            assert pulled(rows, ids).tolist() == added_in_one(step, 2)[ids].tolist()
            rows.push(*pushes(step, number))
        assert pulled(rows, np.arange(50)).tobytes() == added_in_one(10, 2).tobytes()

    in_threads(*[partial(main, number) for number in range(2)])
    # No row was made that nobody has asked for, and none by two servers.
    found = sorted(sorted(set(each.values()[0] % servers)) for each in kept)
    assert found == [[number] for number in range(servers)]


def test_async_rows_do_not_wait(new_cluster: NewCluster) -> None:
    cluster = new_cluster(2, 2)
    both, done = threading.Barrier(2), threading.Event()

    def main(number: int) -> None:
        rows = rows_in(cluster, number, "async")
        both.wait(20)
        if number:
            assert done.wait(20)
        handles = [rows.push([1, 2], np.ones((2, 3))) for _ in range(20)]
        own = pulled(rows, [2])  # is answered after the worker's own pushes
        done.set()
        wanted = first_rows(SPEC, "e", np.array([2])) + (20 if not number else 40)
        np.testing.assert_allclose(own, wanted)
        assert all(handle.poll() for handle in handles)

    in_threads(*[partial(main, number) for number in range(2)])


def test_async_rows_are_divided_by_the_workers(new_cluster: NewCluster) -> None:
    cluster = new_cluster(2, 2)
    rows, _ = in_threads(*[partial(rows_in, cluster, n, "async", scale="1/W") for n in range(2)])
    wanted = first_rows(SPEC, "e", np.array([1, 2]))
    rows.push([2, 1, 2], np.array([[1.0] * 3, [5.0] * 3, [2.0] * 3])).wait()
    wanted += np.array([[2.5], [1.5]])
    assert pulled(rows, [1, 2]).tobytes() == wanted.tobytes()


def test_wrong_ids_and_rows_are_refused_before_anything_is_sent(new_cluster: NewCluster) -> None:
    rows = rows_in(new_cluster(2, 1), 0, "async")
    for ids, error, words in [
        ([1.0], TypeError, "are float64: give integers"),
        ([True], TypeError, "are bool"),
        ([0, 50], ValueError, "'e' has no row 50: its 50 rows are numbered from 0 to 49"),
        ([-1], ValueError, "no row -1"),
        (np.array([2**63], np.uint64), ValueError, "no row 9223372036854775808"),
        ([[1]], ValueError, r"shape \(1, 1\)"),
    ]:
        with pytest.raises(error, match=words):
            rows.pull(ids)
    with pytest.raises(ValueError, match=r"float32 of shape \(1, 3\), and float64 of shape"):
        rows.push([1], np.ones((1, 3), np.float32))
    with pytest.raises(ValueError, match=r"shape \(2, 3\), and float64 of shape \(1, 3\)"):
        rows.push([1], np.ones((2, 3)))
    assert pulled(rows, []).shape == (0, 3)


def test_the_scheduler_places_no_rows() -> None:
    registry = Registry(2)
    spec = TensorSpec("e", "float32", (2**40, 64))
    options = TableOptions("sync", rows=RowsSpec(2**40, 64).fields)
    assert registry.declare(0, "e", [spec], options) == (0, [])
    other = TableOptions("sync", rows=RowsSpec(2**40, 64, seed=1).fields)
    with pytest.raises(ValueError, match="the rows of the table 'e'"):
        registry.declare(1, "e", [spec], other)
    again = Registry(2)
    again.load(registry.state())
    assert again.declare(1, "e", [spec], options) == (0, [])
    first_key, parts = again.declare(
        0, "t", [TensorSpec("t", "float32", (4,))], TableOptions("sync")
    )
    assert (first_key, len(parts)) == (0, 1)
