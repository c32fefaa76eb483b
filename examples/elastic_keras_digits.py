"""keras_digits.py, in a job that ranks may leave and join while it trains.

    python examples/elastic_keras_digits.py                                           # one rank
    hvdlite-run -np 2 --min-np 1 -H localhost:2 python examples/elastic_keras_digits.py

Kill a rank (the script prints its process id): the others go on from the last commit, and a new
one takes its place. The lines marked "elastic:" are what keras_digits.py does not have. The data
comes with scikit-learn. A step works on as many images whatever the number of ranks, as far as they
can be divided.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # no notes about the CPU

import keras
import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

import hvdlite.keras as hvd

TEST_IMAGES = 360  # of 1797

Data = tuple[NDArray[np.float32], NDArray[np.int64]]


def network() -> Any:
    """Two convolutions and two dense layers: images (B, 8, 8, 1) to scores (B, 10)."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10),
        ]
    )


def load() -> tuple[Data, Data]:
    """The digits, shuffled alike on every rank: what to train with, and what to test with."""
    digits = load_digits()
    images = np.asarray(digits.images, np.float32)[..., None] / 16
    labels = np.asarray(digits.target, np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return (images[train], labels[train]), (images[test], labels[test])


def share(data: Data) -> Data:
    """This rank's share of `data`, as large as that of all others."""
    images, labels = (part[: len(part) // hvd.size() * hvd.size()] for part in data)
    return images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]


class Report(keras.callbacks.Callback):  # type: ignore[misc]
    """Says what every epoch has reached; its numbers go on after a change of the ranks."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.accuracy = logs["val_accuracy"]
        if hvd.rank() == 0:
            print(f"accuracy {self.state.accuracy:.2%}, ranks {hvd.size()}", flush=True)


# elastic: this function is called again after each change of the ranks, with the same state.
@hvd.elastic.run
def train(state: Any, data: Data, test: Data, args: argparse.Namespace) -> None:
    """Train until all epochs are done."""
    start = time.perf_counter()
    if state.epoch < args.epochs:
        state.model.fit(
            *share(data),
            batch_size=max(1, args.batch_size // hvd.size()),
            initial_epoch=state.epoch,
            epochs=args.epochs,
            validation_data=share(test),
            verbose=0,
            callbacks=[
                hvd.callbacks.MetricAverageCallback(),
                Report(state),
                # elastic: count what is done, and commit it; their order does not matter.
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.CommitStateCallback(state, batches_per_commit=args.commit_every),
            ],
        )
    state.seconds += time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to read digits.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="images a step, on all ranks")
    parser.add_argument("--commit-every", type=int, default=5, help="steps between two commits")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error("--epochs must be at least 1")

    hvd.init()
    print(f"rank {hvd.rank()} is process {os.getpid()}", flush=True)
    keras.utils.set_random_seed(args.seed + hvd.rank())  # another dropout on each rank
    data, test = load()
    model = network()
    steps = args.epochs * (len(data[1]) // args.batch_size)
    rate = keras.optimizers.schedules.CosineDecay(args.lr, steps)
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(rate)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    # elastic: all that a rank needs to go on. No broadcast is needed: newcomers receive the state.
    state = hvd.elastic.KerasState(model, epoch=0, batch=0, seconds=0.0, accuracy=0.0)
    train(state, data, test, args)
    if hvd.rank() == 0:
        images_per_second = args.epochs * len(data[1]) / state.seconds
        print(
            f"test accuracy {state.accuracy:.2%}, {images_per_second:.0f} images/s, "
            f"ranks {hvd.size()}"
        )


if __name__ == "__main__":
    main()
