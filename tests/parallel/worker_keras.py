"""One rank that trains with Keras, and compares with training alone."""

from __future__ import annotations

import tests.lean  # noqa: F401

# isort: split
import sys
from typing import Any

import numpy as np

import hvdlite.keras as hvd
from hvdlite.keras.framework import keras
from tests.keras.training import (
    BATCH,
    INPUTS,
    TARGETS,
    adam,
    compiled,
    make_model,
    share,
    step_by,
)


def train(optimizer: Any, rank: int, size: int, *callbacks: Any) -> np.ndarray:
    """The weights after two epochs, of which other ranks begin with other weights."""
    model = make_model()
    if callbacks:
        model.set_weights([weights * (rank + 1) for weights in model.get_weights()])
    model.compile(optimizer=optimizer, loss=keras.losses.MeanSquaredError())
    model.fit(
        share(INPUTS, rank, size),
        share(TARGETS, rank, size),
        batch_size=BATCH // size,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return np.concatenate([np.asarray(weights).ravel() for weights in model.get_weights()])


def leave_at_once() -> None:
    """Shut down while steps that were begun have not ended: they do before."""
    weights, count = keras.Variable(np.zeros(1 << 20), name="weights"), 5
    optimizer, expected = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), 1 + hvd.size()
    optimizer.build([weights])
    gradient = keras.ops.full(weights.shape, 2.0 * (hvd.rank() + 1))
    apply = compiled(optimizer.stateless_apply)
    for _ in range(count):
        step_by(apply, optimizer, [gradient], [weights])
    hvd.shutdown()
    assert (weights.numpy() == -count * expected).all()


def main() -> None:
    hvd.init()
    other = "torch" if keras.backend.backend() == "tensorflow" else "tensorflow"
    assert other not in sys.modules, "imported for nobody"
    rank, size = hvd.rank(), hvd.size()
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    weights = train(hvd.DistributedOptimizer(adam()), rank, size, broadcast)
    if rank == 0:  # The others have what rank 0 has.
        np.testing.assert_allclose(weights, train(adam(), 0, 1), rtol=1e-4, atol=2e-6)
    everyone = np.asarray(hvd.allgather(weights[None], name="weights"))
    assert (everyone == weights).all()
    if keras.backend.backend() == "jax":
        leave_at_once()
    sys.stdout.write(f"rank {rank} of {size} is content\n")


if __name__ == "__main__":
    main()
