"""Short calls of every collective with data: results, limits, disagreements and interrupts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.runner import EngineRunner
from hvdlite.common.base.lists import split_rows
from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.base import Members
from hvdlite.common.collectives.native.library import library
from hvdlite.common.collectives.native.short_call import LARGE_BYTES, Given, ShortExchange
from hvdlite.common.settings.config import Config
from hvdlite.common.tensors.numpy_adapter import NumpyAdapter
from hvdlite.common.transport.inprocess import InProcessWorld
from tests.ranks import run_ranks, run_threads
from tests.short_calls import (
    GATHER,
    LIMIT_SECONDS,
    begin,
    by_the_data_plane,
    short_calls,
    was_short,
)
from tests.worlds import IN_PROCESS, TCP

pytestmark = pytest.mark.skipif(library("auto") is None, reason="there is no C++ compiler")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int16", "uint8", "bool", "complex64")
FLOAT_BYTES = 4


def rows_of(rank: int, rows: int, columns: int, dtype: str) -> Any:
    """Whole numbers that every dtype holds, others on each rank."""
    random = np.random.default_rng([rank, rows, columns])
    return random.integers(0, 2, (rows, columns)).astype(dtype)


@pytest.mark.parametrize(("ranks", "transport"), [(2, TCP), (3, IN_PROCESS), (5, IN_PROCESS)])
def test_the_results_are_numpys(ranks: int, transport: str, patient: None) -> None:
    every = range(ranks)

    def broadcast(rank: int, rows: int, columns: int, dtype: str) -> None:
        root, data = rows % ranks, rows_of(rank, rows, columns, dtype)
        expected = rows_of(root, rows, columns, dtype)
        if not expected.size:
            return
        name = f"{dtype}.{rows}.{columns}"
        found = was_short(lambda: hvd.broadcast(data, root, name=name))
        assert found.tobytes() == expected.tobytes()
        wide = np.zeros((rows, 2 * columns), dtype)
        wide[:, ::2] = data
        was_short(lambda: hvd.broadcast_(wide[:, ::2], root, name=f"wide {name}"))
        assert wide[:, ::2].tobytes() == expected.tobytes() and not wide[:, 1::2].any()

    def allgather(rank: int, rows: int, columns: int, dtype: str) -> None:
        for given in (lambda each: rows, lambda each: (rows + each) % 4):
            inputs = [rows_of(each, given(each), columns, dtype) for each in every]
            found = was_short(lambda: hvd.allgather(inputs[rank], name=f"{dtype}.{columns}"))  # noqa: B023
            assert found.shape == (sum(map(len, inputs)), columns)
            assert found.tobytes() == np.concatenate(inputs).tobytes()

    def alltoall(rank: int, rows: int, columns: int, dtype: str) -> None:
        splits = [[(rows + each + to) % 3 for to in every] for each in every]
        inputs = [rows_of(each, sum(splits[each]) + 2, columns, dtype) for each in every]
        found, received = was_short(
            lambda: hvd.alltoall(inputs[rank], splits[rank], name=f"{dtype}.{columns}")
        )
        starts = [sum(each[:rank]) for each in splits]
        parts = [
            data[start : start + each[rank]]
            for data, start, each in zip(inputs, starts, splits, strict=True)
        ]
        assert received.tolist() == [each[rank] for each in splits]
        assert found.shape == (sum(map(len, parts)), columns)
        assert found.tobytes() == np.concatenate(parts).tobytes()

    def reducescatter(rank: int, rows: int, columns: int, dtype: str) -> None:
        if not rows * columns or dtype == "complex64":
            return
        inputs = [rows_of(each, rows, columns, dtype) for each in every]
        found = was_short(
            lambda: hvd.reducescatter(inputs[rank], name=f"{dtype}.{rows}.{columns}", op=hvd.Sum)
        )
        parts = split_rows(rows, ranks)
        start = sum(parts[:rank])
        total = np.sum([each.astype(float) for each in inputs], 0)[start : start + parts[rank]]
        assert found.shape == total.shape
        assert (found == (total > 0 if dtype == "bool" else total)).all()

    def main(rank: int) -> None:
        begin()
        for dtype in DTYPES:
            for rows, columns in ((0, 3), (1, 1), (4, 0), (7, 3), (64, 257)):
                for check in (broadcast, allgather, alltoall, reducescatter):
                    check(rank, rows, columns, dtype)

    run_ranks(ranks, main, config=GATHER, transport=transport)


def test_the_rows_of_each_member_are_known(patient: None) -> None:
    """The gradient of an allgather needs them, and they change from call to call."""

    def main(rank: int) -> None:
        begin()
        runner = EngineRunner(NumpyAdapter())
        for step in range(4):
            data, options = np.ones(step * rank + 1), CallOptions(hvd.global_process_set)
            result = was_short(lambda: runner.run("allgather", [data], "x", options))  # noqa: B023
            assert [list(rows) for rows in result.rows] == [[1, step + 1]]

    run_ranks(2, main, config=GATHER)


def test_a_reducescatter_has_the_bits_of_the_data_plane(patient: None) -> None:
    def main(rank: int) -> None:
        begin()
        random = np.random.default_rng(rank)
        for dtype in ("float32", "float16", "bfloat16"):
            for op in (hvd.Sum, hvd.Average, hvd.Max, hvd.Product):
                data = random.standard_normal((1025, 3)).astype(dtype)
                options: dict[str, Any] = {"name": f"{dtype}.{op}", "op": op}
                if op == hvd.Sum:
                    options.update(prescale_factor=0.3, postscale_factor=7.0)
                found = was_short(lambda: hvd.reducescatter(data, **options))  # noqa: B023
                expected = by_the_data_plane(data, hvd.reducescatter_async, **options)
                assert found.tobytes() == expected.tobytes(), options

    run_ranks(3, main, config=GATHER)


def calls_of(nbytes: int) -> dict[str, Callable[[], Any]]:
    """Calls in which a rank gives so much, of which the results are checked."""
    rank, ranks = hvd.rank(), hvd.size()
    data = np.full((nbytes // FLOAT_BYTES // ranks * ranks, 1), rank + 1, np.float32)
    parts = np.repeat(np.arange(1, ranks + 1), len(data))
    share = len(data) // ranks

    def check(found: Any, expected: Any) -> None:
        assert found.ravel().tolist() == np.broadcast_to(expected, found.size).tolist()

    return {
        "broadcast": lambda: check(hvd.broadcast(data, 1, name=f"b{nbytes}"), 2),
        "allgather": lambda: check(hvd.allgather(data, name=f"g{nbytes}"), parts),
        "alltoall": lambda: check(hvd.alltoall(data, name=f"a{nbytes}"), parts[::ranks]),
        "reducescatter": lambda: check(
            hvd.reducescatter(data, name=f"r{nbytes}", op=hvd.Sum),
            [sum(range(ranks + 1))] * share,
        ),
    }


def test_the_limit(patient: None) -> None:
    """What is at the limit is short, what is beyond goes through the slots; both are right."""

    def main(rank: int) -> None:
        begin()
        for call in calls_of(LARGE_BYTES).values():
            was_short(call)
        before = short_calls().completed
        for call in calls_of(LARGE_BYTES + 2 * FLOAT_BYTES).values():
            call()
        assert short_calls().completed == before

    run_ranks(2, main, config=GATHER)


@pytest.mark.parametrize(("ranks", "nbytes"), [(2, 1 << 20), (4, 512 << 10), (8, 256 << 10)])
def test_the_limit_where_every_rank_reads_the_data_of_all(
    ranks: int, nbytes: int, patient: None
) -> None:
    def main(rank: int) -> None:
        begin()
        data = np.ones(nbytes, np.uint8)
        assert was_short(lambda: hvd.allgather(data, name="g")).size == ranks * nbytes
        before, data = short_calls().completed, np.ones(nbytes + 1, np.uint8)
        assert hvd.allgather(data, name="g2").size == ranks * nbytes + ranks
        assert short_calls().completed == before

    run_ranks(ranks, main, config=GATHER)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_limit_of_reductions(ranks: int, patient: None) -> None:
    def main(rank: int) -> None:
        begin()
        data = np.full(LARGE_BYTES, rank, np.uint8)
        result = was_short(lambda: hvd.allreduce(data, name="r", op=hvd.Sum))
        assert (result == sum(range(ranks))).all()
        before, data = short_calls().completed, np.ones(LARGE_BYTES + 1, np.uint8)
        assert hvd.allreduce(data, name="r2", op=hvd.Sum)[-1] == ranks
        assert short_calls().completed == before

    run_ranks(ranks, main, config=GATHER)


def test_another_data_plane_that_the_user_wishes_for() -> None:
    def main(rank: int) -> None:
        begin()
        before = short_calls().completed
        for call in calls_of(64).values():
            call()
        assert short_calls().completed == before

    run_ranks(2, main, config=Config(data_plane="ring"))


def test_ranks_of_which_one_gives_too_much(patient: None) -> None:
    """It says so, and the others do not wait for it in vain, which would take long here."""

    def main(rank: int) -> None:
        begin()
        for step in range(20):
            rows = 300_000 if rank == step % 3 else 1
            found = hvd.allgather(np.full(rows, float(rank)), name="g")
            expected = [300_000.0 if each == step % 3 else 1.0 for each in range(3)]
            assert [float((found == each).sum()) for each in range(3)] == expected

    start = time.monotonic()
    run_ranks(3, main, config=GATHER)
    assert time.monotonic() - start < LIMIT_SECONDS


ONES = np.ones((4, 3), np.float32)
DISAGREEMENTS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "root rank": (
        lambda: hvd.broadcast(ONES, 0, name="x"),
        lambda: hvd.broadcast(ONES, 1, name="x"),
    ),
    "shape of a broadcast": (
        lambda: hvd.broadcast(ONES, 0, name="x"),
        lambda: hvd.broadcast(ONES[:2], 0, name="x"),
    ),
    "width of an allgather": (
        lambda: hvd.allgather(ONES, name="x"),
        lambda: hvd.allgather(ONES[:, :2], name="x"),
    ),
    "dtype of an alltoall": (
        lambda: hvd.alltoall(ONES, name="x"),
        lambda: hvd.alltoall(ONES.astype(np.int32), name="x"),
    ),
    "operation of a reducescatter": (
        lambda: hvd.reducescatter(ONES, name="x", op=hvd.Sum),
        lambda: hvd.reducescatter(ONES, name="x", op=hvd.Max),
    ),
    "dimensions": (
        lambda: hvd.allgather(ONES, name="x"),
        lambda: hvd.allgather(np.float32(1), name="x"),
    ),
}


@pytest.mark.parametrize("calls", DISAGREEMENTS.values(), ids=DISAGREEMENTS)
def test_disagreements_have_the_texts_of_the_coordinator(
    calls: tuple[Callable[[], Any], Callable[[], Any]],
) -> None:
    def main(rank: int) -> str:
        begin()
        with pytest.raises(hvd.HorovodInternalError) as failure:
            calls[rank]()
        assert hvd.allreduce(np.ones(1), name="later", op=hvd.Sum).tolist() == [2]
        return str(failure.value)

    texts = run_ranks(2, main)
    assert ".x'" in texts[0] and "rank 0" in texts[0] and "rank 1" in texts[0]
    assert texts == run_ranks(2, main, config=Config(native="off"))


def test_ranks_of_which_some_wait_and_others_do_not() -> None:
    """A rank reports what others make short calls of; they learn it, and report it too."""
    starts = {
        "allreduce": lambda data, name: hvd.allreduce_async(data, name=name, op=hvd.Sum),
        "broadcast": lambda data, name: hvd.broadcast_async(data, 0, name=name),
        "allgather": lambda data, name: hvd.allgather_async(data, name=name),
        "alltoall": lambda data, name: hvd.alltoall_async(data, name=name),
        "reducescatter": lambda data, name: hvd.reducescatter_async(data, name=name, op=hvd.Sum),
    }
    expected = {
        "allreduce": [[3.0] * 3] * 3,
        "broadcast": [[0.0] * 3] * 3,
        "allgather": [[0.0] * 3 + [1.0] * 3 + [2.0] * 3] * 3,
        "alltoall": [[0.0, 1.0, 2.0]] * 3,
        "reducescatter": [[3.0]] * 3,
    }

    def main(rank: int) -> None:
        for step in range(20):
            for collective, start in starts.items():
                data = np.full(3, float(rank))
                if (step + rank) % 3 == 0:
                    result = by_the_data_plane(data, start, name="x")
                else:
                    result = hvd.synchronize(start(data, "x"))
                result = result[0] if collective == "alltoall" else result
                assert result.tolist() == expected[collective][rank]

    start = time.monotonic()
    run_ranks(3, main, config=GATHER)
    assert time.monotonic() - start < LIMIT_SECONDS


def test_a_rank_that_does_not_wait_says_so_whatever_it_gives(patient: None) -> None:
    """The others wait for a call with other rows than its last one, and would do so for long."""

    def main(rank: int) -> None:
        begin()
        was_short(lambda: hvd.allgather(np.ones(1), name="x"))
        for step in range(4):
            data = np.ones(step + 2)
            if rank == 0:
                found = by_the_data_plane(data, hvd.allgather_async, name="x")
            else:
                found = hvd.allgather(data, name="x")
            assert found.shape == (2 * step + 4,)

    start = time.monotonic()
    run_ranks(2, main, config=GATHER)
    assert time.monotonic() - start < LIMIT_SECONDS


def test_a_rank_that_has_joined_gives_nothing(patient: None) -> None:
    def main(rank: int) -> None:
        begin()
        data = np.full((2, 2), rank + 1.0)
        for joined in (False, True):
            if joined and rank == 1:
                break
            others = [0] if joined else [0, 1]
            expected = np.repeat([each + 1.0 for each in others], 2)
            assert hvd.allgather(data, name="g")[:, 0].tolist() == expected.tolist()
            assert hvd.broadcast(data, 0, name="b").tolist() == [[1, 1], [1, 1]]
            found = hvd.alltoall(data, name="a")
            assert found[:, 0].tolist() == [each + 1.0 for each in others]
            part = hvd.reducescatter(data, name="r", op=hvd.Sum)
            assert part.tolist() == [[sum(each + 1.0 for each in others)] * 2]
        hvd.join()
        begin()
        assert was_short(lambda: hvd.allgather(data, name="g")).shape == (4, 2)

    run_ranks(2, main, config=GATHER)


@pytest.mark.parametrize("scalars", [(0,), (1,), (0, 1)])
def test_a_tensor_without_rows_is_not_taken_for_one_with_rows(scalars: tuple[int, ...]) -> None:
    def main(rank: int) -> None:
        begin()
        for _ in range(3):
            assert hvd.allgather(np.ones(3), name="g").tolist() == [1.0] * 6
        tensor = np.float64(7.0) if rank in scalars else np.ones(3)
        with pytest.raises(hvd.HorovodInternalError, match="no rows; reshape it"):
            hvd.allgather(tensor, name="g")
        assert hvd.allgather(np.ones(3), name="g").tolist() == [1.0] * 6

    run_ranks(2, main, config=GATHER)


def test_a_rank_that_has_no_memory_for_the_result(
    patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call fails and says why; the others have their results, and all go on."""
    empty_like, full = NumpyAdapter.empty_like, threading.local()

    def without_memory(self: Any, tensor: Any, shape: tuple[int, ...]) -> Any:
        if getattr(full, "here", False):
            raise MemoryError("no memory is left")
        return empty_like(self, tensor, shape)

    def main(rank: int) -> None:
        begin()
        full.here = rank == 1
        if rank == 1:
            text = "rank 1 could not take .*allgather.x.*MemoryError: no memory is left"
            with pytest.raises(hvd.HorovodInternalError, match=text):
                hvd.allgather(np.ones(1), name="x")
        else:
            assert hvd.allgather(np.ones(1), name="x").tolist() == [1, 1]
        full.here = False
        assert was_short(lambda: hvd.allgather(np.ones(1), name="x")).tolist() == [1, 1]

    monkeypatch.setattr(NumpyAdapter, "empty_like", without_memory)
    run_ranks(2, main, config=GATHER)


def test_a_round_of_told_rows_is_completed_by_all_or_by_none() -> None:
    """Ranks withdraw, decline and come too late at random times, and take when they like."""
    ranks, rounds, code = 3, 300, library("auto")
    assert code is not None
    world, all_came = InProcessWorld(Topology.single_host(ranks)), threading.Barrier(ranks)
    outcomes = [False] * ranks

    def main(rank: int) -> int:
        exchange, random = ShortExchange(world.transport(rank), code), Random(rank)
        exchange.open(True)
        call = exchange.prepare(Members(tuple(range(ranks)), rank, world.topology), 1 << 40)
        exchange.add_data(call, Given(LARGE_BYTES, counts=1, row_bytes=1))
        told = np.zeros(ranks, np.int64)
        source, target = np.empty(9, np.uint8), np.empty(9 * ranks, np.uint8)
        call.rows, call.input = told.ctypes.data, source.ctypes.data
        completed = 0
        all_came.wait(LIMIT_SECONDS)
        for step in range(rounds):
            source.fill((step + rank) % 256)
            told[0] = call.nbytes = (step + rank) % 10
            call.timeout_ns = random.choice((0, 20_000, 200_000, 10**9 if step % 3 else 0))
            call.output = None
            if random.random() < 0.1:
                exchange.decline(call)
                call.completed = 0
            else:
                exchange.run(call)
            outcomes[rank] = bool(call.completed)
            if call.completed:
                completed += 1
                assert told.tolist() == [(step + each) % 10 for each in range(ranks)]
                call.output = target.ctypes.data
                exchange.take(call)
                expected = np.repeat([(step + each) % 256 for each in range(ranks)], told)
                assert target[: told.sum()].tolist() == expected.tolist()
            all_came.wait(LIMIT_SECONDS)
            assert len(set(outcomes)) == 1, (step, outcomes)
            all_came.wait(LIMIT_SECONDS)
        return completed

    results = run_threads(ranks, main)
    assert len(set(results)) == 1
    assert 0 < results[0] < rounds
