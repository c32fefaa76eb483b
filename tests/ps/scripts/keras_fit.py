"""A process of a cluster that fits a model of Keras, on the backend that the environment names.

A worker then fits the same model alone, with the batches of both workers, and compares.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

BATCH, BATCHES = 8, 3


def data(worker: int) -> tuple[Any, Any]:
    made = np.random.default_rng(worker)
    count = BATCH * BATCHES
    return made.normal(size=(count, 6)).astype("float32"), made.integers(0, 3, count)


def of_both() -> list[Any]:
    """Return the data of both workers, batch by batch in turns."""
    halves = [data(worker) for worker in range(2)]
    starts = range(0, BATCH * BATCHES, BATCH)
    return [
        np.concatenate([half[place][at : at + BATCH] for at in starts for half in halves])
        for place in range(2)
    ]


def fit(optimizer: Any, x: Any, y: Any, batch: int) -> list[Any]:
    import keras

    initializer = keras.initializers.GlorotUniform(1)
    layers = [
        keras.layers.Input((6,)),
        keras.layers.Dense(8, "relu", kernel_initializer=initializer),
        keras.layers.Dense(3, kernel_initializer=initializer),
    ]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss)
    model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
    weights: list[Any] = model.get_weights()
    return weights


def main(folder: Path) -> None:
    import keras

    from hvdlite.keras import ps

    assert keras.backend.backend() == os.environ["KERAS_BACKEND"]
    ps.init()
    optimizer = ps.DistributedOptimizer(keras.optimizers.Adam(0.05))
    weights = fit(optimizer, *data(ps.rank()), BATCH)
    assert optimizer.finished_steps == 2 * BATCHES
    np.savez(folder / f"worker{ps.rank()}.npz", *weights)
    ps.start("ones", keras.ops.ones(3))
    ps.barrier()
    ps.push("ones", keras.ops.ones(3))
    ps.barrier()
    assert type(ps.pull("ones")) is type(keras.ops.ones(3))
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(ps.pull("ones")), [3.0] * 3)
    ps.barrier()
    ps.shutdown()
    alone = fit(keras.optimizers.Adam(0.05), *of_both(), 2 * BATCH)
    for own, wanted in zip(weights, alone, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-4, atol=1e-6)
