"""A process of a cluster that fits a model of Keras, on the backend that the environment names.

Within the second epoch it goes back to what was saved in the first. A worker then does the same
alone, with the batches of both workers, and compares.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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


def jump(save: Callable[[Any], None], load: Callable[[Any], None]) -> Any:
    """Return a callback that calls the first after two batches, the other one after four."""
    import keras

    class Jump(keras.callbacks.Callback):  # type: ignore[misc]
        finished = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.finished += 1
            if self.finished == 2:
                save(self.model)
            if self.finished == BATCHES + 1:
                load(self.model)

    return Jump()


def fit(optimizer: Any, x: Any, y: Any, batch: int, callback: Any) -> list[Any]:
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
    model.fit(x, y, batch, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
    weights: list[Any] = model.get_weights()
    return weights


def main(folder: Path) -> None:
    import keras

    from hvdlite.keras import ps

    assert keras.backend.backend() == os.environ["KERAS_BACKEND"]
    ps.init()
    optimizer = ps.DistributedOptimizer(keras.optimizers.Adam(0.05))

    def save(_: Any) -> None:
        if ps.rank() == 0:
            ps.save(folder / "saved")
        ps.barrier()

    callback = jump(save, lambda _: ps.load(folder / "saved"))
    weights = fit(optimizer, *data(ps.rank()), BATCH, callback)
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
    kept: list[Any] = []

    def variables(model: Any) -> list[Any]:
        if keras.backend.backend() == "jax":
            model.jax_state_sync()
        return [*model.variables, *model.optimizer.variables]

    def keep(model: Any) -> None:
        kept.extend(np.array(keras.ops.convert_to_numpy(each)) for each in variables(model))

    def go_back(model: Any) -> None:
        for variable, value in zip(variables(model), kept, strict=True):
            variable.assign(value)

    alone = fit(keras.optimizers.Adam(0.05), *of_both(), 2 * BATCH, jump(keep, go_back))
    for own, wanted in zip(weights, alone, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-4, atol=1e-6)
