"""What AutoGraph says of our functions where a `tf.function` uses them: nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

import hvdlite.keras as hvd_keras
import hvdlite.tf as hvd
from tests.ranks import run_ranks


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """All that TensorFlow's logger says within the test from the level of warnings on."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    tf.get_logger().addHandler(handler)
    yield said
    tf.get_logger().removeHandler(handler)


def _slices_and_rows(variables: list[tf.Variable]) -> tf.Tensor:
    """A loss with a gradient that is dense and one that is `tf.IndexedSlices`."""
    return tf.reduce_sum(tf.gather(variables[0], [0])) + tf.reduce_sum(variables[1])


def _by_tape(variables: list[tf.Variable]) -> Callable[[], None]:
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = _slices_and_rows(variables)
        for variable, gradient in zip(
            variables, hvd.DistributedGradientTape(tape).gradient(loss, variables), strict=True
        ):
            variable.assign_sub(tf.convert_to_tensor(gradient))

    return step


def _by_partial_tape(variables: list[tf.Variable]) -> Callable[[], None]:
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = _slices_and_rows(variables)
        tape = hvd.PartialDistributedGradientTape(tape)
        local, pairs = tape.get_local_and_global_gradients(loss, variables)
        for variable, gradient in [*local, *pairs]:
            variable.assign_sub(tf.convert_to_tensor(gradient))

    return step


def _by_optimizer(wrapped: Any) -> Callable[[list[tf.Variable]], Callable[[], None]]:
    def make(variables: list[tf.Variable]) -> Callable[[], None]:
        optimizer = wrapped()

        def step() -> None:
            pairs = optimizer.compute_gradients(lambda: _slices_and_rows(variables), variables)
            optimizer.apply_gradients(pairs)

        return step

    return make


def _by_keras(**options: Any) -> Callable[[list[tf.Variable]], Callable[[], None]]:
    def make(variables: list[tf.Variable]) -> Callable[[], None]:
        optimizer = hvd_keras.DistributedOptimizer(
            tf.keras.optimizers.SGD(1.0), sparse_as_dense=True, **options
        )
        optimizer.build(variables)

        def step() -> None:
            with tf.GradientTape() as tape:
                loss = _slices_and_rows(variables)
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        return step

    return make


def _v1(**options: Any) -> Any:
    descent = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    return hvd.DistributedOptimizer(descent, sparse_as_dense=True, **options)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(_by_tape, id="tape"),
        pytest.param(_by_partial_tape, id="partial tape"),
        pytest.param(_by_optimizer(_v1), id="v1"),
        pytest.param(_by_optimizer(lambda: _v1(op=hvd.Adasum)), id="v1 adasum"),
        pytest.param(_by_keras(), id="keras"),
        pytest.param(_by_keras(backward_passes_per_step=2), id="keras passes"),
    ],
)
def test_no_warning_is_printed_of_a_step_in_a_function(
    make: Callable[[list[tf.Variable]], Callable[[], None]], warnings: list[str]
) -> None:
    def main(rank: int) -> None:
        variables = [tf.Variable(tf.ones([2, 2])), tf.Variable(tf.ones(2))]
        step = tf.function(make(variables))
        step()
        step()
        assert variables[1].numpy().tolist() != [1.0, 1.0]

    run_ranks(2, main)
    assert not [said for said in warnings if "AutoGraph" in said]
