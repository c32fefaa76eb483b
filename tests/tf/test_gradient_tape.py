"""Tapes on parts of a batch have the gradients of one tape on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdlite.tf as hvd
from hvdlite.tf import DistributedGradientTape, PartialDistributedGradientTape
from tests.ranks import run_ranks

Array = np.ndarray[Any, Any]
MODES = ("eager", "graph")
ROWS, VOCABULARY = 12, 5
X = np.random.default_rng(1).normal(size=(ROWS, 3)).astype(np.float32)
WORDS = np.random.default_rng(2).integers(0, VOCABULARY, ROWS)


def mode_of(mode: str, function: Callable[[], Any]) -> Any:
    """What the function gives, twice called: the second time from what the first has left."""
    run = tf.function(function) if mode == "graph" else function
    run()
    return tf.nest.map_structure(as_array, run())


def as_array(gradient: Any) -> Array:
    array: Array = tf.convert_to_tensor(gradient).numpy()
    return array


class Model:
    """A dense layer and an embedding, whose gradient is `tf.IndexedSlices`."""

    def __init__(self) -> None:
        self.kernel = tf.Variable(np.ones((3, 2)), dtype=tf.float32, name="kernel")
        self.bias = tf.Variable([0.5, -1.0], name="bias")
        self.table = tf.Variable(np.arange(10.0).reshape(VOCABULARY, 2), dtype=tf.float32)
        self.variables = {"dense": [self.kernel, self.bias], "table": self.table}

    def loss(self, rows: slice, shift: tf.Tensor) -> tf.Tensor:
        words = tf.nn.embedding_lookup(self.table, WORDS[rows])
        hidden = tf.tanh(X[rows] @ self.kernel + self.bias) * words
        return tf.reduce_mean((hidden + shift) ** 2)


def gradients(mode: str, rows: slice, wrap: Callable[[Any], Any] = lambda tape: tape) -> Any:
    """Of the model on some rows of the batch, and of a tensor."""
    model, shift = Model(), tf.constant([0.25, 2.0])

    def compute() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(shift)
            loss = model.loss(rows, shift)
        return wrap(tape).gradient(loss, {**model.variables, "shift": shift})

    return mode_of(mode, compute)


def part(rank: int, size: int) -> slice:
    return slice(rank * ROWS // size, (rank + 1) * ROWS // size)


def assert_close(result: Any, expected: Any, tolerance: float = 1e-5) -> None:
    tf.nest.assert_same_structure(result, expected)
    for each, wanted in zip(tf.nest.flatten(result), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(each, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("size", "mode"), [(1, "graph"), (2, "eager"), (3, "eager"), (3, "graph")])
def test_parts_are_the_whole_batch(size: int, mode: str) -> None:
    expected = gradients("eager", slice(0, ROWS))

    def main(rank: int) -> None:
        assert_close(gradients(mode, part(rank, size), DistributedGradientTape), expected)

    run_ranks(size, main)


OPTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "predivide": ({"gradient_predivide_factor": 4.0}, 1e-5),
    "fp16": ({"compression": hvd.Compression.fp16}, 1e-2),
    "bf16, dense": ({"compression": hvd.Compression.bf16, "sparse_as_dense": True}, 5e-2),
    "dense": ({"sparse_as_dense": True}, 1e-5),
    "two groups": ({"groups": 2}, 1e-5),
    "more groups than gradients": ({"groups": 9, "sparse_as_dense": True}, 1e-5),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case: str) -> None:
    options, tolerance = OPTIONS[case]
    expected = gradients("eager", slice(0, ROWS))

    def main(rank: int) -> None:
        result = gradients("graph", part(rank, 2), lambda t: DistributedGradientTape(t, **options))
        assert_close(result, expected, tolerance)

    run_ranks(2, main)


@pytest.mark.parametrize("op", ["Sum", "Max"])
def test_other_operations(op: str) -> None:
    parts = [gradients("eager", part(rank, 3)) for rank in range(3)]
    combine: Any = {"Sum": np.sum, "Max": np.max}[op]
    expected = tf.nest.map_structure(lambda *each: combine(each, axis=0), *parts)

    def main(rank: int) -> None:
        def wrap(tape: Any) -> Any:
            return DistributedGradientTape(tape, op=getattr(hvd, op), sparse_as_dense=True)

        assert_close(gradients("eager", part(rank, 3), wrap), expected)

    run_ranks(3, main)


def test_a_process_set_and_groups_of_variables() -> None:
    expected = gradients("eager", slice(0, ROWS))

    def main(rank: int) -> None:
        pair = hvd.add_process_set([0, 2])
        model = Model()
        shift = tf.zeros(2)
        groups = [[model.kernel, model.table, Model().bias], [model.bias]]

        def wrap(tape: Any) -> Any:
            return DistributedGradientTape(
                tape, sparse_as_dense=True, groups=groups, process_set=pair
            )

        rows = slice(0, ROWS) if rank == 1 else part(rank // 2, 2)
        assert_close(gradients("eager", rows, wrap), expected)
        with tf.GradientTape() as tape:
            loss = model.loss(rows, shift)
        result = wrap(tape).gradient(loss, [model.kernel, model.table])
        if rank != 1:
            assert all(isinstance(each, tf.Tensor) for each in result)

    run_ranks(3, main)


@pytest.mark.parametrize("mode", MODES)
def test_local_sources(mode: str) -> None:
    def main(rank: int) -> None:
        local, shared = tf.Variable([2.0, 3.0]), tf.Variable([1.0, 1.0])

        def compute(scale: bool) -> Any:
            tape = DistributedGradientTape(tf.GradientTape(), scale_local_gradients=scale)
            tape.register_local_source(local)
            with tape:
                loss = tf.reduce_sum(local * shared) * (1.0 + 2 * rank)
            return [
                each[0][1] for each in tape.get_local_and_global_gradients(loss, (local, shared))
            ]

        result = mode_of(mode, lambda: compute(True))
        assert_close(result, [np.full(2, 0.5 + rank), np.array([4.0, 6.0])])
        result = mode_of(mode, lambda: compute(False))
        assert_close(result, [np.full(2, 1.0 + 2 * rank), np.array([4.0, 6.0])])

    run_ranks(2, main)


def test_local_layers() -> None:
    def main(rank: int) -> None:
        def dense(layer: str) -> Any:
            return tf.keras.layers.Dense(2, kernel_initializer="ones", name=layer)

        own, shared = dense("own"), dense("shared")
        with PartialDistributedGradientTape(tf.GradientTape(), local_layers=own) as tape:
            loss = tf.reduce_sum(shared(own(X[part(rank, 2)])))
        weights = [*own.trainable_weights, *shared.trainable_weights]
        result = tape.gradient(loss, weights)
        with tf.GradientTape() as plain:
            loss = tf.reduce_sum(shared(own(X[part(rank, 2)])))
        expected = plain.gradient(loss, weights)
        assert_close(result[:2], [each / 2 for each in expected[:2]])
        everyone = [hvd.allreduce(each, name=f"{i}") for i, each in enumerate(expected[2:])]
        assert_close(result[2:], everyone)

    run_ranks(2, main)


def test_names_do_not_depend_on_how_many_layers_a_process_has_made() -> None:
    def main(rank: int) -> None:
        for _ in range(rank + 1):  # the last of them is dense_N, with another N on each rank
            model = tf.keras.Sequential([tf.keras.layers.Dense(1), tf.keras.layers.Dense(1)])
        model.build((None, 3))

        @tf.function
        def compute() -> Any:
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_sum(model(X) * (rank + 1))
            tape = DistributedGradientTape(tape)
            with tf.name_scope(f"scope{rank}"):
                first = tape.gradient(loss, model.trainable_variables)
                second = tape.gradient(loss, model.trainable_variables, use_generic_names=True)
            return first, second

        first, second = compute()
        assert_close(first, second)
        assert_close(first[-1], np.array([12 * 1.5]))

    run_ranks(2, main)


def test_it_is_the_tape_that_it_wraps() -> None:
    def main(rank: int) -> None:
        variable, x = tf.Variable(3.0), tf.constant(float(1 + rank))
        wrapped = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        with DistributedGradientTape(wrapped) as tape:
            tape.watch([variable, x])
            y = variable * x * x
            with tape.stop_recording():
                z = variable * 1.0
        assert isinstance(tape, tf.GradientTape)
        assert tape.watched_variables() == wrapped.watched_variables() == (variable,)
        for _ in range(2):
            assert float(tape.gradient(y, variable)) == 2.5
        assert float(wrapped.gradient(y, variable)) == (1 + rank) ** 2
        assert tape.gradient(z, variable) is None
        zero = tape.gradient(z, variable, None, tf.UnconnectedGradients.ZERO)
        assert float(zero) == 0
        assert float(tape.gradient(y, variable, output_gradients=2 * x)) == 9.0
        assert float(tape.jacobian(y, x)) == 3 * 2 * (1 + rank)  # of this rank alone
        ragged = tf.ragged.constant([[1.0, 2.0], [3.0]])
        with DistributedGradientTape(tf.GradientTape()) as tape:
            tape.watch(ragged)
            y = ragged * ragged
        with pytest.raises(ValueError, match="is a RaggedTensor, which no collective takes"):
            tape.gradient(y, ragged)

    run_ranks(2, main)


@pytest.mark.parametrize("mode", [*MODES, "around a function"])
def test_gradients_of_gradients(mode: str) -> None:
    def main(rank: int) -> None:
        cube, other = tf.Variable(3.0), tf.Variable(1.0)

        def inner() -> Any:
            with tf.GradientTape() as tape:
                loss = cube**3 * (1.0 + rank) * other
            return DistributedGradientTape(tape, groups=1).gradient(loss, [cube, other])

        traced = tf.function(inner) if mode == "around a function" else inner

        def outer() -> Any:
            with tf.GradientTape() as tape:
                first, _ = traced()
            return first, tape.gradient(first, cube)

        function = tf.function(outer) if mode == "graph" else outer
        first, second = function()
        assert float(first) == 27 * 1.5
        assert float(second) == 18 * (
            1 + rank
        )  # reduced as the first: what came was 1 on all ranks

    run_ranks(2, main)


def test_misuse() -> None:
    def main(rank: int) -> None:
        tape = tf.GradientTape()
        for options, text in (
            ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op != Average"),
            ({"groups": "two"}, "groups should be"),
            ({"groups": [[1]]}, "groups must consist of lists of tf.Variable"),
        ):
            with pytest.raises(ValueError, match=text):
                DistributedGradientTape(tape, **options)
        with pytest.raises(ValueError, match="must be Keras layers, not int"):
            PartialDistributedGradientTape(tape, local_layers=[1])
        with pytest.raises(ValueError, match="wrap it once"):
            DistributedGradientTape(DistributedGradientTape(tape))
        with pytest.warns(DeprecationWarning, match="num_groups"):
            DistributedGradientTape(tape, num_groups=1)

    run_ranks(1, main)


def test_before_init() -> None:
    variable = tf.Variable(1.0)
    with DistributedGradientTape(tf.GradientTape()) as tape:
        loss = variable * 2
    words = r"has not been initialized; use hvd.init\(\)"
    with pytest.raises(ValueError, match=words):
        tape.gradient(loss, variable)
    with pytest.raises(hvd.HorovodInternalError, match=words):
        hvd.allreduce(variable)
    with pytest.raises(ValueError, match=words):
        hvd.size()
    with pytest.raises(tf.errors.OpError, match="has not been initialized"):
        tf.function(hvd.allreduce)(variable)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_the_iterations_of_a_loop_are_traced(graph: bool) -> None:
    def main(rank: int) -> None:
        weight = tf.Variable(tf.ones((4, 3)))

        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.matmul(tf.ones((2, 4)), weight) ** 2)
            (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [weight])
            weight.assign_sub(0.1 * gradient)

        train = tf.function(step) if graph else step
        with hvd.trace_iterations() as trace:
            for _ in range(3):
                with trace.iteration():
                    train()
            rows = trace.rows()
        assert [row.iteration for row in rows] == [0, 1, 2]
        for row in rows:
            assert row.bp_end is not None
            (segment,) = row.segments
            assert row.fp_start < row.bp_end <= segment.start < segment.end < row.iteration_end
            assert segment.bytes == 48 and row.overlap == 0

    run_ranks(2, main)
