"""Gradients of TensorFlow's collectives follow Horovod's law, and so do those in loops.

Each rank gives its own gradient of its own output; the oracle says what comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdlite.tf as hvd
from hvdlite.common.base.lists import split_rows
from tests.ranks import run_ranks

Array = np.ndarray[Any, Any]
Verb = Callable[[Any], Any]
SIZE = 3
ROWS = 4  # 3 ranks get 2, 1 and 1 of them
PARTS = split_rows(ROWS, SIZE)


@pytest.fixture(params=["eager", "graph", "graph with Python's operations"])
def traced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether functions become graphs, whose collectives may be compiled or not."""
    if "Python" in request.param:
        monkeypatch.setenv("HVDLITE_TF_NATIVE", "off")
    yield request.param != "eager"


def numbers(rank: int, *shape: int) -> Array:
    return np.random.default_rng(rank).normal(size=shape).astype(np.float32)


def all_ranks(*shape: int) -> Array:
    return np.stack([numbers(rank, *shape) for rank in range(SIZE)])


def splits(rank: int) -> list[int]:
    return [(rank + other) % 3 for other in range(SIZE)]


def returned(rank: int) -> Array:
    """What comes back from alltoall for the gradients that all ranks give."""
    received = [[splits(other)[each] for other in range(SIZE)] for each in range(SIZE)]
    parts = [
        np.split(numbers(other, sum(rows), 2), np.cumsum(rows)[:-1])[rank]
        for other, rows in enumerate(received)
    ]
    return np.concatenate(parts)


def scattered() -> Array:
    return np.concatenate([numbers(rank, PARTS[rank], 2) for rank in range(SIZE)])


CASES: dict[str, tuple[Callable[[Any, int], Any], Callable[[int], int], Callable[[int], Array]]] = {
    # the collective, the rows that a rank gives, the gradient that it gets
    "allreduce": (
        lambda x, rank: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
        lambda rank: ROWS,
        lambda rank: all_ranks(ROWS, 2).sum(0) * 1.5,
    ),
    "average": (
        lambda x, rank: hvd.grouped_allreduce([x * 2, x])[1],
        lambda rank: ROWS,
        lambda rank: all_ranks(ROWS, 2).mean(0),
    ),
    "compression": (
        lambda x, rank: hvd.allreduce(x, compression=hvd.Compression.fp16),
        lambda rank: ROWS,
        lambda rank: all_ranks(ROWS, 2).mean(0),
    ),
    "allgather": (
        lambda x, rank: hvd.allgather(x),
        lambda rank: rank + 1,
        lambda rank: np.split(all_ranks(6, 2).mean(0), [1, 3])[rank],
    ),
    "grouped_allgather": (
        lambda x, rank: hvd.grouped_allgather([x * 2, x])[1],
        lambda rank: rank + 1,
        lambda rank: np.split(all_ranks(6, 2).mean(0), [1, 3])[rank],
    ),
    "broadcast": (
        lambda x, rank: hvd.broadcast(x, 1),
        lambda rank: ROWS,
        lambda rank: all_ranks(ROWS, 2).mean(0) * (rank == 1),
    ),
    "alltoall": (
        lambda x, rank: hvd.alltoall(x, splits(rank))[0],
        lambda rank: sum(splits(rank)),
        returned,
    ),
    "alltoall of some rows": (
        lambda x, rank: hvd.alltoall(x, splits(rank))[0],
        lambda rank: sum(splits(rank)) + 2,
        lambda rank: np.concatenate([returned(rank), np.zeros((2, 2), np.float32)]),
    ),
    "reducescatter": (
        lambda x, rank: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=0.5),
        lambda rank: ROWS,
        lambda rank: scattered() * 0.5 * SIZE,
    ),
    "grouped_reducescatter": (
        lambda x, rank: hvd.grouped_reducescatter([x * 2, x])[1],
        lambda rank: ROWS,
        lambda rank: scattered(),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str, traced: bool) -> None:
    collective, rows, expected = CASES[case]

    def main(rank: int) -> None:
        def compute(x: Any) -> Any:
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                y = collective(x, rank)
            upstream = numbers(rank, y.shape[0] or len(returned(rank)), 2) if not traced else None
            if upstream is None:
                upstream = tf.numpy_function(
                    lambda each: numbers(rank, *each.shape), [y], tf.float32
                )
                upstream.set_shape(y.shape)
            return [tape.gradient(y, x, upstream) for _ in range(2 if case == "allreduce" else 1)]

        x = tf.ones([rows(rank), 2])
        for gradient in (tf.function(compute) if traced else compute)(x):
            tolerance = 1e-2 if case == "compression" else 1e-5
            np.testing.assert_allclose(gradient, expected(rank), tolerance, tolerance)

    run_ranks(SIZE, main)


SECOND: dict[str, tuple[Verb, float, float]] = {
    # the collective, the second derivative of its squares on the root, and on others
    "allreduce": (lambda x: hvd.allreduce(x, op=hvd.Sum), 8.0, 8.0),
    "allgather": (hvd.allgather, 1.0, 1.0),
    "broadcast": (lambda x: hvd.broadcast(x, 0), 1.0, 0.0),
    "alltoall": (hvd.alltoall, 2.0, 2.0),
    "alltoall of some rows": (
        lambda x: hvd.alltoall(tf.concat([x, x], 0), splits=[1, 1])[0],
        2.0,
        2.0,
    ),
    "reducescatter": (lambda x: hvd.reducescatter(x, op=hvd.Sum), 8.0, 8.0),
}


@pytest.mark.parametrize("case", SECOND)
def test_second_derivatives_follow_the_same_law(case: str, traced: bool) -> None:
    collective, on_root, elsewhere = SECOND[case]

    def main(rank: int) -> None:
        def compute(x: Any) -> Any:
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    loss = tf.reduce_sum(collective(x) ** 2)
                first = inner.gradient(loss, x)
            return outer.gradient(first, x)

        second = (tf.function(compute) if traced else compute)(tf.ones(2) * (1.0 + rank))
        np.testing.assert_allclose(second, np.full(2, elsewhere if rank else on_root))

    run_ranks(2, main)


def test_loops(traced: bool) -> None:
    def main(rank: int) -> None:
        # Graphs of this rank alone: numbers that TensorFlow gives to graphs differ from now on.
        for _ in range(rank):
            tf.function(lambda x: tf.map_fn(tf.square, x))(tf.ones(2))

        def compute(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x[0]
                for _ in tf.range(2):
                    y = hvd.allreduce(y * y, op=hvd.Sum)
                mapped = tf.map_fn(lambda each: hvd.allreduce(each**2, op=hvd.Sum), x)
                loss = y + tf.reduce_sum(mapped)
            return loss, tape.gradient(loss, x)

        own = 1.0 + rank
        loss, gradient = (tf.function(compute) if traced else compute)(tf.fill([2], own))
        assert float(loss) == 50 + 2 * 5  # (1 + 4) ** 2 * 2 from the loop
        assert gradient.numpy().tolist() == [80 * own + 4 * own, 4 * own]

    run_ranks(2, main)


@pytest.mark.parametrize("graph", [False, True])
def test_a_halo_has_edges_and_gradients(graph: bool) -> None:
    whole = np.arange(2 * 9 * 3, dtype=np.float32).reshape(2, 9, 3)
    padded = np.pad(whole, ((0, 0), (1, 2), (0, 0)))
    weights = [np.random.default_rng(rank).random((2, 6, 3), np.float32) for rank in range(3)]
    wanted = np.zeros_like(padded)
    for rank, weight in enumerate(weights):
        wanted[:, 3 * rank : 3 * rank + 6] += weight

    def main(rank: int) -> None:
        part = tf.constant(whole[:, 3 * rank : 3 * rank + 3])

        def run(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                output = hvd.halo(x, 1, 1, 2, name="halo")
            return output, tape.gradient(output, x, tf.constant(weights[rank]))

        signature = [tf.TensorSpec([None, 3, 3], tf.float32)]
        call = tf.function(run, input_signature=signature) if graph else run
        output, gradient = call(part)
        np.testing.assert_array_equal(output, padded[:, 3 * rank : 3 * rank + 6])
        np.testing.assert_allclose(gradient, wanted[:, 1:-2][:, 3 * rank : 3 * rank + 3], atol=1e-6)
        with pytest.raises(ValueError, match="before=4 is wider than the slice"):
            hvd.halo(part, 1, 4, 0)

    run_ranks(3, main)
