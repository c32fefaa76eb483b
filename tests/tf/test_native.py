"""Graphs that run collectives by compiled operations, and by Python: what both must do alike."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdlite.tf as hvd
from hvdlite.common.runtime.current import current
from hvdlite.tf.native import graph_ops
from tests.limits import HANG_SECONDS
from tests.parallel.jobs import run_command
from tests.ranks import run_ranks

SETTING = "HVDLITE_TF_NATIVE"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
PATHS = [pytest.param("on", marks=needs_compiler), "off"]
pytestmark = pytest.mark.timeout(240)  # the first use may have to compile

_one_at_a_time = threading.Lock()  # guards the variable of the environment


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(SETTING, request.param)
    yield request.param


def traced(setting: str, function: Callable[..., Any], *tensors: Any) -> Callable[..., Any]:
    """`function` as a graph that runs collectives in this way."""
    with _one_at_a_time, pytest.MonkeyPatch.context() as patch:
        patch.setenv(SETTING, setting)
        concrete: Callable[..., Any] = tf.function(function).get_concrete_function(*tensors)
        return concrete


# -- ranks that run in different ways


@needs_compiler
def test_ranks_with_and_without_the_operations_work_together() -> None:
    def everything(x: Any) -> Any:
        nested = hvd.allreduce(hvd.allreduce(x, op=hvd.Sum) + 1, op=hvd.Sum)
        for _ in tf.range(2):
            nested = hvd.allreduce(nested, op=hvd.Sum)
        if tf.reduce_sum(nested) > 0:
            nested = hvd.broadcast(nested, 1)
        output, received = hvd.alltoall(x, [1, 1])
        hvd.barrier()
        group = hvd.grouped_allreduce([x, x * 2], op=hvd.Sum)
        return nested, hvd.allgather(x), output, received, hvd.reducescatter(x), *group

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(hvd.allreduce(hvd.allgather(x) ** 2, op=hvd.Sum))
        return tape.gradient(loss, x)

    def main(rank: int) -> None:
        own = np.array([1.0, 3.0], np.float32) + rank
        setting = "on" if rank == 0 else "off"
        results = traced(setting, everything, own)(tf.constant(own))
        total = np.array([3.0, 7.0])
        assert [each.numpy().tolist() for each in results] == [
            ((total + 1) * 8).tolist(),
            [1, 3, 2, 4],
            [1, 2] if rank == 0 else [3, 4],
            [1, 1],
            [total[rank] / 2],
            total.tolist(),
            (2 * total).tolist(),
        ]
        (slope,) = traced(setting, lambda x: [gradient(x)], own)(tf.constant(own))
        np.testing.assert_allclose(slope, 4 * own)

    run_ranks(2, main)


# -- the memory of tensors


def test_only_what_nobody_else_reads_is_written_in_place(path: str) -> None:
    def main(rank: int) -> None:
        variable = tf.Variable([1.0, 2.0])
        constant = tf.constant([5.0, 6.0])

        @tf.function
        def step(given: Any) -> Any:
            made = given + 1.0
            fixed = tf.constant([7.0, 8.0])
            sums = [
                hvd.allreduce(each, op=hvd.Sum)
                for each in (variable, given, made, constant, fixed, tf.identity(made), given * 3.0)
            ]
            return [*sums, made, fixed, variable.read_value()]

        given = tf.constant([3.0, 4.0])
        for _ in range(3):
            results = [each.numpy().tolist() for each in step(given)]
            assert results == [
                [2, 4], [6, 8], [8, 10], [10, 12], [14, 16], [8, 10], [18, 24],
                [4, 5], [7, 8], [1, 2],
            ]  # fmt: skip
        assert [each.numpy().tolist() for each in (variable, constant, given)] == [
            [1, 2], [5, 6], [3, 4],
        ]  # fmt: skip

    run_ranks(2, main)


@needs_compiler
def test_calls_are_forgotten_with_their_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "on")

    def main(rank: int) -> None:
        for _ in range(3):  # TensorFlow itself never forgets what has a gradient of its own
            tf.function(hvd.barrier)()

    gc.collect()
    before = len(graph_ops._registered)
    run_ranks(1, main)
    gc.collect()
    assert len(graph_ops._registered) == before


# -- errors


def failure(function: Callable[..., Any], *tensors: Any) -> tf.errors.OpError:
    with pytest.raises(tf.errors.OpError) as raised:
        tf.function(function)(*tensors)
    return raised.value


def test_errors_have_the_types_of_eager_execution(path: str) -> None:
    def main(rank: int) -> None:
        def mismatch(x: Any) -> Any:
            return hvd.allreduce(x, name="shapes")

        error = failure(mismatch, tf.zeros(2 + rank))
        assert isinstance(error, tf.errors.FailedPreconditionError)
        assert "'allreduce.shapes': ranks disagree on shape" in str(error)
        assert "(2,)" in str(error) and "(3,)" in str(error)
        # Only when it is run can the number of rows be seen.
        rows = tf.function(
            lambda x: hvd.alltoall(x, name="rows"), input_signature=[tf.TensorSpec([None])]
        )
        with pytest.raises(tf.errors.InvalidArgumentError, match="3 rows for 2 ranks"):
            rows(tf.zeros(3))
        again = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))(tf.constant(1.0))
        assert again.numpy() == 2

    run_ranks(2, main)


def test_nothing_is_applied_where_one_of_several_fails(path: str) -> None:
    def main(rank: int) -> None:
        good, bad = tf.Variable([1.0]), tf.Variable(tf.ones(1 + rank))

        error = failure(lambda: hvd.broadcast_([good, bad], 1, name="values"))
        assert isinstance(error, tf.errors.FailedPreconditionError)
        assert good.numpy().tolist() == [1.0]

    run_ranks(2, main)


@pytest.mark.parametrize("leaver", [0, 1])
def test_who_leaves_fails_what_waits(path: str, leaver: int) -> None:
    waits, over = threading.Event(), threading.Event()

    def main(rank: int) -> None:
        runtime = current()

        def leave() -> None:
            assert waits.wait(HANG_SECONDS)
            runtime.shutdown()

        def step(x: Any) -> Any:
            total = hvd.allreduce(x, name="alone")
            waits.set()  # the graph is built, and about to run
            return total

        thread = threading.Thread(target=leave, daemon=True)
        if rank == leaver:
            thread.start()
        if rank == 0:
            error = failure(step, tf.ones(3))
            over.set()
            kind = [tf.errors.UnknownError, tf.errors.FailedPreconditionError][leaver]
            assert isinstance(error, kind)
            assert ["shut down", "rank 1"][leaver] in str(error)
        assert over.wait(HANG_SECONDS)
        if rank == leaver:
            thread.join()

    run_ranks(2, main)


def test_a_step_that_is_cancelled_waits_for_nobody(path: str) -> None:
    """And what it has started ends without it."""
    is_cancelled = threading.Event()

    def main(rank: int) -> None:
        if rank == 1:
            assert is_cancelled.wait(HANG_SECONDS)
            assert hvd.allreduce(tf.constant([1.0, 2.0]), name="late", op=hvd.Sum).numpy()[0] == 2
        else:
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                late = hvd.allreduce(tf.constant([1.0, 2.0]) * 1.0, name="late", op=hvd.Sum)
                with pytest.raises(tf.errors.DeadlineExceededError):
                    session.run(late, options=tf.compat.v1.RunOptions(timeout_in_ms=500))
            is_cancelled.set()
        total = tf.function(lambda x: hvd.allreduce(x, name="next", op=hvd.Sum))(tf.constant(1.0))
        assert total.numpy() == 2

    run_ranks(2, main)


def test_a_graph_serves_from_one_init_to_the_next() -> None:
    paths = ("off", "on") if COMPILER else ("off",)
    program = f"""
import os
import tensorflow as tf
import hvdlite.tf as hvd

def attempt(total):
    try:
        return float(total(tf.constant(3.0)))
    except tf.errors.UnknownError as error:
        return "not been initialized" in str(error)

def try_everywhere():
    total = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    print(attempt(total))
    for _ in range(2):
        hvd.init()
        print(attempt(total))
        hvd.shutdown()
        print(attempt(total))

for path in {paths}:
    os.environ["{SETTING}"] = path
    try_everywhere()
"""
    done = run_command([sys.executable, "-c", program], TF_CPP_MIN_LOG_LEVEL="3")
    assert done.returncode == 0, done.stdout
    lines = [line for line in done.stdout.splitlines() if line in ("True", "3.0")]
    assert lines == ["True", "3.0", "True", "3.0", "True"] * len(paths), done.stdout
