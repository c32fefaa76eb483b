"""Gradients that are handed over together: the same results, and little Python in a steady step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdlite.numpy as hvd_numpy
import hvdlite.tf as hvd
from hvdlite.common.api import prepared_bucket
from hvdlite.common.api.tensor_entries import PlacedEntry, TensorEntry
from hvdlite.common.gradients import buckets
from hvdlite.common.gradients.buckets import ReductionConfig, Scaling
from hvdlite.common.runtime.current import current
from hvdlite.tf.calls import bucket_call, collective_call
from hvdlite.tf.optimizer.gradient_exchange import Reducer
from tests.ranks import run_ranks
from tests.short_calls import GATHER, begin, interrupted_after, short_calls, until

Array = np.ndarray[Any, Any]
Step = Callable[[Sequence[Any]], list[Any]]
SHAPES = [(3, 4), (), (5,), (0, 2), (17, 3), (64,)]
WAYS = ["eager", "compiled", "Python"]
COMPILER = shutil.which(os.environ.get("CXX", "c++"))


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How steps run: eagerly, or in graphs whose collectives are compiled or not."""
    name: str = request.param
    if name == "compiled":
        if COMPILER is None:
            pytest.skip("there is no C++ compiler")
        monkeypatch.setenv("HVDLITE_TF_NATIVE", "on")
    elif name == "Python":
        monkeypatch.setenv("HVDLITE_TF_NATIVE", "off")
    yield name


def values(rank: int, step: int, index: int, shape: tuple[int, ...]) -> Array:
    """Whole numbers that differ between ranks, steps and gradients."""
    start = 1000 * step + 100 * index + 10 * rank
    numbers = np.arange(start, start + int(np.prod(shape)), dtype=np.float32)
    return numbers.reshape(shape)


def given(rank: int, step: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Array]:
    return [values(rank, step, index, shape) for index, shape in enumerate(shapes)]


def check(results: Sequence[Any], step: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
    """Compare with the means that numpy computes of all ranks' values."""
    for index, (result, shape) in enumerate(zip(results, shapes, strict=True)):
        mean = np.mean([values(rank, step, index, shape) for rank in range(2)], axis=0)
        np.testing.assert_array_equal(np.asarray(result), mean)
        assert tuple(result.shape) == shape


def make_step(way: str, count: int = len(SHAPES), **options: Any) -> Step:
    """A step that reduces so many gradients by one reducer, whose shapes a graph does not know."""
    variables = [tf.Variable(0.0) for _ in range(count)]
    groups = options.pop("groups", None)
    chosen = [[variables[index] for index in group] for group in groups] if groups else None
    reduction = ReductionConfig(
        options.pop("compression", hvd.Compression.none), Scaling(), False, hvd.global_process_set,
        **options,
    )  # fmt: skip
    reducer = Reducer("R", reduction, chosen)

    def step(gradients: Sequence[Any]) -> list[Any]:
        return reducer.reduce(gradients, variables)

    if way == "eager":
        return lambda arrays: step([tf.convert_to_tensor(each) for each in arrays])
    graph = tf.function(step, autograph=False, reduce_retracing=True)
    return lambda arrays: list(graph([tf.convert_to_tensor(each) for each in arrays]))


@pytest.mark.parametrize("groups", [None, [[0, 2], [4]]])
def test_steps_are_those_of_one_process(way: str, groups: Any) -> None:
    def main(rank: int) -> None:
        step = make_step(way, groups=groups)
        for number in range(4):
            check(step(given(rank, number)), number)

    run_ranks(2, main)


def test_other_dtypes(way: str) -> None:
    dtypes = [tf.float16, tf.float32, tf.bfloat16, tf.float64, tf.int64]

    def main(rank: int) -> None:
        step = make_step(way, len(dtypes))
        for number in range(2):
            means = step([tf.fill([3], tf.cast(2 * (rank + number), each)) for each in dtypes])
            assert [each.dtype for each in means] == dtypes
            for each in means:
                np.testing.assert_array_equal(tf.cast(each, tf.float32), np.full(3, 1 + 2 * number))

    run_ranks(2, main)


def test_shapes_may_change_between_steps(way: str) -> None:
    def main(rank: int) -> None:
        step = make_step(way, 2)
        for number, rows in enumerate([2, 5, 5, 1, 2, 0, 3]):
            shapes = [(rows, 2), (7, rows)]
            check(step(given(rank, number, shapes)), number, shapes)

    run_ranks(2, main)


def test_gradients_of_this_rank_stay_what_they_are(way: str) -> None:
    """They may be a variable's value, or be read by others: results have memory of their own."""

    def main(rank: int) -> None:
        variable = tf.Variable(tf.fill([1000], float(rank)))
        constant = tf.constant(np.full(1000, 4.0 * rank, np.float32))
        step = make_step(way, 3)

        def both() -> tuple[list[Any], Any]:
            read = variable.read_value()
            gradients = [read, constant, constant]
            return step(gradients), read + 0

        run = both if way == "eager" else tf.function(both, autograph=False)
        for _ in range(2):
            reduced, read = run()
            for each, mean in zip(reduced, (0.5, 2, 2), strict=True):
                np.testing.assert_array_equal(each, np.full(1000, mean))
            np.testing.assert_array_equal(read, np.full(1000, rank))
            np.testing.assert_array_equal(variable, np.full(1000, rank))
            np.testing.assert_array_equal(constant, np.full(1000, 4 * rank))

    run_ranks(2, main)


def test_results_outlive_later_steps(way: str) -> None:
    def main(rank: int) -> None:
        step = make_step(way)
        kept = [step(given(rank, number)) for number in range(3)]
        for number, results in enumerate(kept):
            check(results, number)

    run_ranks(2, main)


def test_an_error_concerns_one_step(way: str) -> None:
    def main(rank: int) -> None:
        step = make_step(way, 2)
        check(step(given(rank, 0, [(2, 2), (3,)])), 0, [(2, 2), (3,)])
        with pytest.raises(tf.errors.FailedPreconditionError, match="shape"):
            step(given(rank, 1, [(2, 2), (3 + rank,)]))
        check(step(given(rank, 2, [(2, 2), (3,)])), 2, [(2, 2), (3,)])

    run_ranks(2, main)


def test_ranks_may_run_them_in_different_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(rank: int) -> None:
        step = make_step("eager" if rank == 0 else "graph")
        for number in range(3):
            check(step(given(rank, number)), number)

    run_ranks(2, main)


def test_an_eager_step_of_a_small_model_is_one_short_call() -> None:
    shapes = [(64, 64)] * 16

    def main(rank: int) -> None:
        step = make_step("eager", len(shapes))
        begin()
        short = []
        for number in range(10):
            before = short_calls().completed
            results = step(given(rank, number, shapes))
            short.append(short_calls().completed - before)
            check(results, number, shapes)
        assert set(short) - {0} == {1}  # A step that met a busy core may have been a long one.

    run_ranks(2, main, config=GATHER)


def test_ctrl_c_at_any_point_of_an_eager_step() -> None:
    """The other rank has its gradients, and this one goes on with the same names."""
    modules = [prepared_bucket, prepared_bucket, bucket_call, collective_call]

    def main(rank: int) -> None:
        step, engine = make_step("eager"), current().engine
        begin()
        for points in range(1000):
            go_on = np.zeros(1)
            run = partial(step, given(rank, points))
            if rank:
                check(run(), points)
            else:
                go_on += interrupted_after(engine, "add_pending", points, modules, run)
                until(lambda: not engine._pending._entries)
            if not hvd_numpy.allreduce(go_on, name="go on", op=hvd.Sum)[0]:
                break
        assert 10 < points < 200
        check(step(given(rank, 0)), 0)

    run_ranks(2, main)


@pytest.mark.parametrize("way", ["eager", "compiled"], indirect=True)
def test_a_steady_step_makes_no_entry_for_a_tensor(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def counted(cls: type) -> None:
        original: Any = cls.__init__  # type: ignore[misc]

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            made.append(cls.__name__)
            original(self, *args, **kwargs)

        monkeypatch.setattr(cls, "__init__", init)

    def main(rank: int) -> None:
        step = make_step(way)
        for number in range(2):
            check(step(given(rank, number)), number)
        hvd_numpy.barrier()
        if rank == 0:
            counted(TensorEntry)
            counted(PlacedEntry)
        hvd_numpy.barrier()
        check(step(given(rank, 2)), 2)

    run_ranks(2, main)
    assert made == []


def test_gradients_of_a_graph_are_divided_where_enough_bytes_are_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Backward computes the last ones first: they travel while it goes on."""
    monkeypatch.setattr(buckets, "enough_bytes", lambda *_: 200)
    sizes = {"a": 100, "b": 300, "c": 0, "d": 150, "e": 60}
    found = buckets.batches_of(["e", "d", "c", "b", "a"], sizes, Any, 1)  # type: ignore[arg-type]
    assert found == [["e", "d"], ["c", "b"], ["a"]]
