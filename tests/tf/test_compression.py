"""Compressors with error feedback in TensorFlow without Keras: sessions, and no tapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdlite.tf as hvd
from tests.compressors import BlockModel
from tests.ranks import run_ranks

SHAPES = [(8, 12), (30,)]


def gradient(rank: int, step: int, place: int) -> Any:
    return np.random.default_rng([rank, step, place]).standard_normal(SHAPES[place])


def test_a_session_makes_the_steps_of_the_model() -> None:
    steps, passes = 3, 2

    def main(rank: int) -> Any:
        graph = tf.Graph()
        with graph.as_default(), tf.compat.v1.Session(graph=graph) as session:
            places = [
                tf.compat.v1.placeholder(tf.float32, shape, f"g{number}")
                for number, shape in enumerate(SHAPES)
            ]
            variables = [
                tf.compat.v1.get_variable(f"v{number}", initializer=tf.zeros(shape))
                for number, shape in enumerate(SHAPES)
            ]
            loss = sum(
                tf.reduce_sum(variable * place)
                for variable, place in zip(variables, places, strict=True)
            )
            optimizer = hvd.DistributedOptimizer(
                tf.compat.v1.train.GradientDescentOptimizer(1.0),
                compression=hvd.Compression.int8(8),
                backward_passes_per_step=passes,
                groups=[[variable] for variable in variables],
            )
            train = optimizer.minimize(loss)
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(tf.compat.v1.local_variables_initializer())
            for step in range(steps * passes):
                values = {
                    place: gradient(rank, step, number) for number, place in enumerate(places)
                }
                session.run(train, values)
            assert optimizer.compression_state()["residuals"]
            return session.run(variables)

    results = run_ranks(2, main)
    for number, shape in enumerate(SHAPES):
        model = BlockModel(2, shape, 8)
        expected = np.zeros(shape)
        for step in range(steps):
            sums = [
                sum(
                    gradient(rank, step * passes + each, number).astype(np.float32)
                    for each in range(passes)
                )
                for rank in range(2)
            ]
            expected = expected - model.step(sums) / 2
        for values in results:
            np.testing.assert_allclose(values[number], expected, atol=5e-5)


def test_a_restored_commit_has_what_was_not_sent() -> None:
    """Steps made again after a restore are the same, to the bit; without the optimizer not."""

    def steps(optimizer: Any, variable: Any, rank: int, first: int) -> Any:
        for step in range(first, first + 2):
            gradients = [tf.constant(gradient(rank, step, 0), tf.float32)]
            optimizer.apply_gradients(zip(gradients, [variable], strict=True))
        return variable.numpy()

    def main(rank: int) -> None:
        variable = tf.Variable(tf.zeros(SHAPES[0]))
        optimizer = hvd.DistributedOptimizer(
            tf.keras.optimizers.SGD(1.0), compression=hvd.Compression.topk(0.1)
        )
        optimizer.build([variable])
        steps(optimizer, variable, rank, 0)
        variables = [variable, *optimizer.variables]
        state = hvd.elastic.TensorFlowState(variables, optimizer=optimizer, step=0)
        without = hvd.elastic.TensorFlowState(variables, step=0)
        once = steps(optimizer, variable, rank, 2)
        state.restore()
        np.testing.assert_array_equal(once, steps(optimizer, variable, rank, 2))
        without.restore()
        assert (steps(optimizer, variable, rank, 2) != once).any()

    run_ranks(2, main)


def test_ranks_with_different_compressors_are_told_so() -> None:
    """Also where there are several buckets, of which the others wait for each."""

    def main(rank: int) -> None:
        import keras

        variables = [keras.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0),
            compression=hvd.Compression.none if rank else hvd.Compression.int8(),
            groups=[[variable] for variable in variables],
        )
        gradients = [tf.ones(shape) for shape in SHAPES]
        with pytest.raises(Exception, match="int8"):
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

    run_ranks(2, main)


def test_two_optimizers_in_one_function_whose_variables_have_the_same_names() -> None:
    def main(rank: int) -> Any:
        import keras

        pairs = []
        for _ in range(2):
            variable = keras.Variable(np.zeros((8, 12), np.float32), name="kernel")
            optimizer = hvd.DistributedOptimizer(
                keras.optimizers.SGD(1.0), compression=hvd.Compression.int8()
            )
            optimizer.build([variable])
            pairs.append((optimizer, variable))

        @tf.function
        def step(scale: Any) -> None:
            for number, (optimizer, variable) in enumerate(pairs):
                gradient = tf.ones((8, 12)) * scale * float(number + 1)
                optimizer.apply_gradients([(gradient, variable)])

        for _ in range(3):
            step(tf.constant(float(rank + 1)))
        return [variable.numpy() for _, variable in pairs]

    for first, second in run_ranks(2, main):
        np.testing.assert_allclose(first, np.full((8, 12), -4.5), atol=1e-4)
        np.testing.assert_allclose(second, np.full((8, 12), -9.0), atol=1e-4)


def test_a_tape_has_no_place_for_what_was_not_sent() -> None:
    def main(rank: int) -> None:
        with (
            tf.GradientTape() as tape,
            pytest.raises(ValueError, match=r"int8\(block=256\) remembers .* for one step"),
        ):
            hvd.DistributedGradientTape(tape, compression=hvd.Compression.int8())

    run_ranks(1, main)


def test_gradients_start_in_whatever_order_their_graph_runs() -> None:
    """In a function that TensorFlow compiles, with a bucket for each gradient."""

    def main(rank: int) -> Any:
        import keras

        variables = [keras.Variable(np.zeros(shape, np.float32)) for shape in SHAPES * 4]
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0),
            compression=hvd.Compression.powersgd(1),
            groups=[[variable] for variable in variables],
        )
        optimizer.build(variables)

        @tf.function
        def step(scale: Any) -> None:
            gradients = [tf.ones(shape) * scale for shape in SHAPES * 4]
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        for _ in range(3):
            step(tf.constant(float(rank + 1)))
        return [variable.numpy() for variable in variables]

    for values in run_ranks(2, main):
        for value in values:
            np.testing.assert_allclose(value, np.full(value.shape, -4.5), atol=1e-4)
