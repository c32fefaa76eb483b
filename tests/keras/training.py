"""Small models whose training is compared: on several ranks, and in one process without hvdlite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

import hvdlite.keras as hvd
from hvdlite.keras.framework import LEGACY, keras
from tests.ranks import run_ranks

BACKEND = keras.backend.backend()
# Where it does not matter how a step is run: to trace a function costs more than a few steps.
EAGERLY = {"run_eagerly": BACKEND == "tensorflow"}
ROWS, BATCH, WIDTH = 36, 12, 4
_random = np.random.default_rng(0)
INPUTS = _random.normal(size=(ROWS, WIDTH)).astype(np.float32)
TARGETS = _random.normal(size=(ROWS, 2)).astype(np.float32)
WEIGHTS = [
    _random.normal(size=shape).astype(np.float32) * 0.4
    for shape in ((WIDTH, 5), (5,), (5, 2), (2,))
]
Weights = list[np.ndarray]
Make = Callable[[], Any]


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def make_model() -> Any:
    """A model that has the same weights each time."""
    model = keras.Sequential(
        [
            keras.layers.Input((WIDTH,)),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(2),
        ]
    )
    model.set_weights(WEIGHTS)
    return model


def share(rows: np.ndarray, rank: int, size: int) -> np.ndarray:
    """This rank's part of each batch."""
    batches = rows.reshape(-1, BATCH, rows.shape[-1])
    return batches[:, rank::size].reshape(-1, rows.shape[-1])


def fit(
    model: Any,
    optimizer: Any,
    rank: int = 0,
    size: int = 1,
    built: bool = not LEGACY,
    **compiled: Any,
) -> Weights:
    """Train for two epochs on this rank's part of the data.

    An optimizer that `fit` has to build traces its first step twice.
    """
    model.compile(optimizer=optimizer, loss=keras.losses.MeanSquaredError(), **compiled)
    if built:
        model.optimizer.build(model.trainable_variables)
    model.fit(**batches_of(rank, size), epochs=2, verbose=0)
    return numpy_of(model.get_weights())


def batches(inputs: np.ndarray, targets: np.ndarray, rows: int) -> dict[str, Any]:
    """Arguments of `fit` for batches of so many rows.

    For arrays it would have functions of TensorFlow traced, which takes longer than to train.
    """
    if BACKEND == "tensorflow":
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(rows)
        return {"x": data, "shuffle": False}
    return {"x": inputs, "y": targets, "batch_size": rows, "shuffle": False}


def batches_of(rank: int, size: int) -> dict[str, Any]:
    """Arguments of `fit` for this rank's part of all batches."""
    return batches(share(INPUTS, rank, size), share(TARGETS, rank, size), BATCH // size)


def fit_together(size: int, optimizer: Make, **options: Any) -> Weights:
    """The weights after the same on `size` ranks, where they must be bitwise the same."""
    everywhere = run_ranks(size, lambda rank: fit(make_model(), optimizer(), rank, size, **options))
    assert_same(everywhere)
    return everywhere[0]


@cache
def fit_alone(optimizer: Make) -> Weights:
    """What `fit` comes to in one process, by a loop over the same batches."""
    return train(make_model(), optimizer(), steps=2 * ROWS // BATCH)


def train(model: Any, optimizer: Any, rank: int = 0, size: int = 1, steps: int = 4) -> Weights:
    """Train in a loop of the user's own."""
    inputs, targets = share(INPUTS, rank, size), share(TARGETS, rank, size)
    rows = BATCH // size
    apply = compiled(optimizer.stateless_apply) if BACKEND == "jax" else None
    for step in range(steps):
        batch = slice(rows * (step % 3), rows * (step % 3 + 1))
        gradients = gradients_of(model, inputs[batch], targets[batch])
        if apply is None:
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        else:
            step_by(apply, optimizer, gradients, model.trainable_variables)
    return numpy_of(model.get_weights())


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, as JAX compiles it; it may overwrite its first argument."""
    import jax

    made: Callable[..., Any] = jax.jit(function, donate_argnums=0)
    return made


def step_by(
    stateless_apply: Callable[..., Any], optimizer: Any, gradients: Any, variables: Sequence[Any]
) -> None:
    """Make a step of an optimizer as scripts for JAX do."""
    if not optimizer.built:
        optimizer.build(variables)
    state = optimizer.variables
    values = stateless_apply(
        [each.value for each in state], list(gradients), [each.value for each in variables]
    )
    for target, value in zip([*variables, *state], [*values[0], *values[1]], strict=True):
        target.assign(value)


def apply_gradients(optimizer: Any, pairs: Sequence[tuple[Any, Any]]) -> None:
    """Make a step in a loop of the user's own: on JAX a loss scaler has no other way."""
    if BACKEND == "jax":
        gradients, variables = zip(*pairs, strict=True)
        step_by(optimizer.stateless_apply, optimizer, gradients, variables)
    else:
        optimizer.apply_gradients(pairs)


def train_together(size: int, optimizer: Make) -> Weights:
    """The weights after the same on `size` ranks, where they must be bitwise the same."""
    everywhere = run_ranks(size, lambda rank: train(make_model(), optimizer(), rank, size))
    assert_same(everywhere)
    return everywhere[0]


def assert_same(everywhere: Sequence[Weights]) -> None:
    """All ranks have bitwise the same."""
    for weights in everywhere:
        for mine, first in zip(weights, everywhere[0], strict=True):
            np.testing.assert_array_equal(mine, first)


def assert_close(weights: Weights, expected: Weights) -> None:
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-6)


def wrapped(make: Make, **options: Any) -> Make:
    """Makes a distributed optimizer of what `make` makes."""
    return lambda: hvd.DistributedOptimizer(make(), **options)


def numpy_of(values: Sequence[Any]) -> Weights:
    """Copies of variables or tensors."""
    copies = []
    for value in values:
        detached = value.detach() if hasattr(value, "detach") else value
        copies.append(np.array(getattr(detached, "numpy", lambda: detached)()))  # noqa: B023
    return copies


def variable(values: Any, name: str = "weights") -> Any:
    """A variable of this Keras."""
    values = np.asarray(values, np.float32)
    if hasattr(keras, "Variable"):
        return keras.Variable(values, name=name)
    import tensorflow as tf

    return tf.Variable(values, name=name)


def tensor(values: Any) -> Any:
    """A tensor of the backend."""
    values = np.asarray(values, np.float32)
    if hasattr(keras, "ops"):
        return keras.ops.convert_to_tensor(values)
    import tensorflow as tf

    return tf.constant(values)


def gradients_of(model: Any, inputs: np.ndarray, targets: np.ndarray) -> list[Any]:
    """The gradients of the mean squared error, as a user's own loop computes them."""
    if BACKEND == "jax":
        import jax

        def loss_of(weights: Any) -> Any:
            outputs, _ = model.stateless_call(weights, model.non_trainable_variables, inputs)
            return keras.ops.mean(keras.ops.square(outputs - targets))

        found: list[Any] = jax.grad(loss_of)([each.value for each in model.trainable_variables])
        return found
    if BACKEND == "torch":
        import torch

        model.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), torch.from_numpy(targets)).backward()
        return [each.value.grad for each in model.trainable_variables]
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(inputs) - targets))
    gradients: list[Any] = tape.gradient(loss, model.trainable_variables)
    return gradients
