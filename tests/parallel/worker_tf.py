"""One rank that trains with TensorFlow in two jobs of one process, and compares with one alone.

python -m tests.parallel.worker_tf [TIMELINE]: then gradients travel early, and rank 1 is killed.
"""

from __future__ import annotations

import tests.lean  # noqa: F401

# isort: split
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import hvdlite.tf as hvd
from tests.parallel.worker_tf_graph import run_gradients_until_a_rank_is_killed

ROWS, STEPS, SEED = 12, 4, 5
v1 = tf.compat.v1
Array = np.ndarray[Any, Any]


def make_data() -> tuple[Array, Array]:
    random = np.random.default_rng(SEED)
    inputs = random.normal(size=(STEPS, ROWS, 6)).astype(np.float32)
    return inputs, random.integers(0, 3, (STEPS, ROWS))


def make_model(normalization: Any) -> Any:
    tf.keras.utils.set_random_seed(SEED)
    # No bias before the normalization: its gradient is nothing but rounding, which Adam scales up.
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(8, use_bias=False),
            normalization(),
            tf.keras.layers.Dense(3, activation="tanh"),
        ]
    )
    model.build((None, 6))
    return model


def train_by_a_tape(rank: int, size: int) -> list[Array]:
    """On this rank's rows of every batch; the weights."""
    plain = tf.keras.layers.BatchNormalization
    model = make_model(hvd.SyncBatchNormalization if size > 1 else plain)
    optimizer = tf.keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    if rank != 0:
        model.trainable_variables[0].assign(np.zeros((6, 8)))
    if size > 1:
        hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)

    @tf.function
    def step(inputs: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            outputs = model(inputs, training=True)
            losses = tf.keras.losses.sparse_categorical_crossentropy(labels, outputs, True)
            loss = tf.reduce_mean(losses)
        if size > 1:
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for inputs, labels in zip(*make_data(), strict=True):
        step(tf.constant(inputs[rank::size]), tf.constant(labels[rank::size]))
    return [weight.numpy() for weight in model.weights]


def train_in_a_session(rank: int, size: int) -> list[Array]:
    """As one did with TensorFlow 1."""
    with tf.Graph().as_default():
        inputs = v1.placeholder(tf.float32, [None, 6])
        weight = v1.get_variable("weight", initializer=np.full((6, 3), 1.0 + rank, np.float32))
        optimizer: Any = v1.train.MomentumOptimizer(0.1, 0.9)
        if size > 1:
            optimizer = hvd.DistributedOptimizer(optimizer)
        step = optimizer.minimize(tf.reduce_mean(tf.tanh(inputs @ weight) ** 2))
        hooks = [hvd.BroadcastGlobalVariablesHook(0)] if size > 1 else []
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            for batch in make_data()[0]:
                session.run(step, {inputs: batch[rank::size]})
            return [session.run(weight)]


def main() -> None:
    for train in (train_by_a_tape, train_in_a_session):
        hvd.init()
        rank, size = hvd.rank(), hvd.size()
        weights = train(rank, size)
        everyone = hvd.allgather_object(weights)
        if rank == 0:  # The others have what rank 0 has.
            for own, wanted in zip(weights, train(0, 1), strict=True):
                np.testing.assert_allclose(own, wanted, rtol=1e-3, atol=1e-5)
        for theirs in everyone:
            for own, other in zip(weights, theirs, strict=True):
                np.testing.assert_array_equal(own, other)
        name = f"rank {rank} of {size}"
        hvd.shutdown()
    sys.stdout.write(f"{name} has trained\n")
    sys.stdout.flush()
    if sys.argv[1:]:
        hvd.init()
        run_gradients_until_a_rank_is_killed(Path(sys.argv[1]))
        hvd.shutdown()
    sys.stdout.write(f"{name} is content\n")


if __name__ == "__main__":
    tf.config.threading.set_inter_op_parallelism_threads(2)
    main()
