"""No path to the weights applies gradients of one rank alone without saying so."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import hvdlite.keras as hvd
from hvdlite.keras.framework import LEGACY, keras
from tests.keras.training import (
    EAGERLY,
    INPUTS,
    TARGETS,
    assert_close,
    assert_same,
    batches_of,
    fit,
    make_model,
    numpy_of,
    sgd,
    tensor,
    train,
    variable,
)
from tests.ranks import run_ranks

BACKEND = keras.backend.backend()
tensorflow_only = pytest.mark.skipif(BACKEND != "tensorflow", reason="a matter of TensorFlow")
keras3_only = pytest.mark.skipif(LEGACY, reason="new in Keras 3")
keras2_only = pytest.mark.skipif(not LEGACY, reason="not in Keras 3")
RATE = () if LEGACY else (tensor(1.0),)

Path = Callable[[Any, Any, Any], Any]  # of an optimizer, a gradient and its variable


class Own(keras.optimizers.SGD):  # type: ignore[misc]
    """An optimizer that does it all by itself, in a method that it has from Keras."""

    def apply_gradients(self, grads_and_vars: Any, **options: Any) -> None:
        for gradient, target in grads_and_vars:
            target.assign(target - gradient)


def plain() -> Any:
    return keras.optimizers.SGD(1.0)


def legacy() -> Any:
    return keras.optimizers.legacy.SGD(1.0)


def on_ranks(make: Callable[[], Any], path: Path, refused: str | None = None) -> None:
    """Gradients of 1 and of 3 reach the weights as 2, or not at all."""

    def step(rank: int) -> None:
        weights, optimizer = variable([0]), hvd.DistributedOptimizer(make())
        gradient = tensor([1.0 + 2 * rank])
        optimizer.build([weights]) if hasattr(optimizer, "build") else None
        if refused is None:
            path(optimizer, gradient, weights)
        else:
            with pytest.raises(RuntimeError, match=rf"^{refused}\(\) .* of this rank alone"):
                path(optimizer, gradient, weights)
        np.testing.assert_array_equal(weights.numpy(), [-2 if refused is None else 0])

    run_ranks(2, step)


def inside_a_scaler() -> Any:
    return keras.optimizers.LossScaleOptimizer(plain())


BOTH: Sequence[Callable[[], Any]] = [plain, legacy] if LEGACY else [plain]
KERAS_2, KERAS_3 = (BOTH if LEGACY else [], [] if LEGACY else BOTH)
# What makes the optimizers, and what is called.
REDUCED: dict[str, tuple[Sequence[Callable[[], Any]], Path]] = {
    "apply_gradients": (BOTH, lambda own, *pair: own.apply_gradients([pair])),
    "an iterator": (BOTH, lambda own, *pair: own.apply_gradients(iter([pair]))),
    "a copy from its config": (
        BOTH, lambda own, *pair: type(own).from_config(own.get_config()).apply_gradients([pair])
    ),
    "another of its class": (
        BOTH, lambda own, *pair: type(own)(learning_rate=1.0).apply_gradients([pair])
    ),
    "a method of its own": (
        [lambda: Own(1.0)], lambda own, *pair: own.apply_gradients([pair])
    ),
    "apply": (KERAS_3, lambda own, gradient, weights: own.apply([gradient], [weights])),
    "apply without variables": (KERAS_3, lambda own, gradient, weights: own.apply([gradient])),
    "apply_gradients of the class": (
        KERAS_3, lambda own, *pair: keras.optimizers.SGD.apply_gradients(own, [pair])
    ),
    "the optimizer inside": (
        [inside_a_scaler] if KERAS_3 else [],
        lambda own, gradient, weights: own.inner_optimizer.apply([gradient], [weights]),
    ),
    "without Keras' aggregation": (
        KERAS_2,
        lambda own, *pair: own.apply_gradients([pair], experimental_aggregate_gradients=False),
    ),
    "skipping Keras' aggregation": (
        KERAS_2[:1],
        lambda own, *pair: own.apply_gradients([pair], skip_gradients_aggregation=True),
    ),
    "minimize": (
        KERAS_2,
        lambda own, gradient, weights: own.minimize(lambda: weights * gradient, [weights]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCED)
def test_ways_that_reduce(name: str) -> None:
    makes, path = REDUCED[name]
    if not makes:
        pytest.skip("a matter of another Keras")
    for make in makes:
        on_ranks(make, path)


@keras3_only
def test_stateless_apply() -> None:
    def step(rank: int) -> None:
        weights, optimizer = variable([0]), hvd.DistributedOptimizer(plain())
        optimizer.build([weights])
        state = [each.value for each in optimizer.variables]
        arguments = (state, [tensor([1.0 + 2 * rank])], [weights.value])
        if BACKEND == "tensorflow":
            with pytest.raises(ValueError, match="not supported with the TensorFlow backend"):
                optimizer.stateless_apply(*arguments)
        else:
            ((result,), _) = optimizer.stateless_apply(*arguments)
            np.testing.assert_array_equal(numpy_of([result]), [[-2]])

    run_ranks(2, step)


@keras3_only
@pytest.mark.skipif(BACKEND == "tensorflow", reason="which has no stateless_apply()")
@pytest.mark.parametrize("around", [True, False])
def test_stateless_apply_of_a_loss_scaler(around: bool) -> None:
    def step(rank: int) -> None:
        scaler, wrap = keras.optimizers.LossScaleOptimizer, hvd.DistributedOptimizer
        optimizer = wrap(scaler(plain())) if around else scaler(wrap(plain()))
        weights = variable([0])
        optimizer.build([weights])
        for gradient in ((1 + 2 * rank) * 2.0**15, np.inf if rank == 1 else 1.0):
            state = [each.value for each in optimizer.variables]
            ((result,), _) = optimizer.stateless_apply(state, [tensor([gradient])], [weights.value])
            np.testing.assert_array_equal(numpy_of([result]), [[-2]])
            weights.assign(result)

    run_ranks(2, step)


def test_the_optimizer_that_was_given_is_the_one_that_was_returned() -> None:
    def step(rank: int) -> None:
        weights, optimizer = variable([0]), plain()
        hvd.DistributedOptimizer(optimizer)
        optimizer.apply_gradients([(tensor([1.0 + 2 * rank]), weights)])
        np.testing.assert_array_equal(weights.numpy(), [-2])

    run_ranks(2, step)


@tensorflow_only
def test_gradients_that_a_tape_has_reduced_are_reduced_once_more() -> None:
    import tensorflow as tf

    import hvdlite.tf

    def step(rank: int) -> None:
        weights, optimizer = tf.Variable([0.0]), hvd.DistributedOptimizer(plain())
        with tf.GradientTape() as tape:
            loss = weights * (1 + 2 * rank)
        tape = hvdlite.tf.DistributedGradientTape(tape)
        optimizer.apply_gradients(zip(tape.gradient(loss, [weights]), [weights], strict=True))
        np.testing.assert_array_equal(weights.numpy(), [-2])

    run_ranks(2, step)


# -- what lies behind apply()


# By the method that refuses: what makes the optimizers, and what is called.
REFUSED: dict[str, tuple[Any, Path]] = {
    "update_step": (plain, lambda own, *pair: own.update_step(*pair, *RATE)),
    **(
        {
            "_internal_apply_gradients": (
                plain, lambda own, *pair: keras.optimizers.SGD.apply_gradients(own, [pair])
            ),
            "_resource_apply_dense": (legacy, lambda own, *pair: own._resource_apply_dense(*pair)),
            "_distributed_apply": (
                legacy, lambda own, *pair: keras.optimizers.legacy.SGD.apply_gradients(own, [pair])
            ),
        }
        if LEGACY
        else {
            "_backend_update_step": (
                plain,
                lambda own, gradient, weights: own._backend_update_step(
                    [gradient], [weights], *RATE
                ),
            ),
            "_backend_apply_gradients": (
                plain,
                lambda own, gradient, weights: keras.optimizers.SGD.apply(
                    own, [gradient], [weights]
                ),
            ),
        }
    ),
}  # fmt: skip
if BACKEND == "torch":
    REFUSED["_parallel_update_step"] = (
        plain, lambda own, gradient, weights: own._parallel_update_step([gradient], [weights], 1.0)
    )  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_ways_that_are_refused(name: str) -> None:
    on_ranks(*REFUSED[name], refused=name)


@keras2_only
def test_an_optimizer_that_keras_2_would_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    monkeypatch.setattr(tf.__internal__.tf2, "enabled", lambda: False)

    def wrap(rank: int) -> None:
        hvd.DistributedOptimizer(legacy())
        with pytest.raises(ValueError, match=r"tf_keras\.optimizers\.legacy"):
            hvd.DistributedOptimizer(plain())

    run_ranks(1, wrap)


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("make", BOTH)
def test_copies_are_refused(make: Callable[[], Any], make_copy: Any) -> None:
    def wrap(rank: int) -> None:
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            make_copy(hvd.DistributedOptimizer(make()))

    run_ranks(1, wrap)


def test_one_rank_has_no_others_to_ask() -> None:
    def step(rank: int) -> None:
        weights, optimizer = variable([0]), hvd.DistributedOptimizer(plain())
        optimizer.build([weights])
        optimizer.update_step(tensor([1.0]), weights, *RATE)
        np.testing.assert_array_equal(weights.numpy(), [-1])

    run_ranks(1, step)


# -- steps that Keras has made


def test_an_optimizer_that_is_wrapped_after_it_was_trained_with() -> None:
    """Keras would use the step again that it has made before."""

    def in_both(rank: int) -> list[np.ndarray]:
        model = make_model()
        fit(model, keras.optimizers.SGD(0.1), 0, 2)  # the same on all ranks
        hvd.DistributedOptimizer(model.optimizer)
        model.fit(**batches_of(rank, 2), verbose=0)
        return numpy_of(model.get_weights())

    everywhere = run_ranks(2, in_both)
    assert_same(everywhere)
    alone, optimizer = make_model(), keras.optimizers.SGD(0.1)
    fit(alone, optimizer, 0, 2, **EAGERLY)
    assert_close(everywhere[0], train(alone, optimizer, steps=3))


def test_single_batches() -> None:
    def train(rank: int) -> list[np.ndarray]:
        model = make_model()
        model.compile(hvd.DistributedOptimizer(sgd()), keras.losses.MeanSquaredError())
        model.train_on_batch(INPUTS[rank::2], TARGETS[rank::2])
        return numpy_of(model.get_weights())

    everywhere = run_ranks(2, train)
    assert_same(everywhere)
    assert (everywhere[0][0] != make_model().get_weights()[0]).any()


@tensorflow_only
def test_a_step_of_its_own_that_xla_compiles() -> None:
    """It cannot be compiled without XLA from here, and fails."""
    import tensorflow as tf

    def train(rank: int) -> None:
        weights, optimizer = tf.Variable([0.0]), hvd.DistributedOptimizer(plain())
        optimizer.build([weights])

        @tf.function(jit_compile=True)
        def step() -> None:
            optimizer.apply_gradients([(tf.constant([1.0]), weights)])

        with pytest.raises(tf.errors.InvalidArgumentError, match="without jit_compile"):
            step()
        np.testing.assert_array_equal(weights.numpy(), [0])

    run_ranks(2, train)
