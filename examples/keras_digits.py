"""A small convolutional network that learns to read handwritten digits, on any number of ranks.

    python examples/keras_digits.py                                          # one rank
    hvdlite-run -np 2 python examples/keras_digits.py                        # two
    KERAS_BACKEND=torch hvdlite-run -np 2 python examples/keras_digits.py    # with PyTorch
    KERAS_BACKEND=jax hvdlite-run -np 2 python examples/keras_digits.py      # with JAX

Keras' own `fit`, with any backend that hvdlite knows. The lines marked "hvdlite:" are all that
makes the script distributed. The data comes with scikit-learn. A step works on the same number of
images whatever the number of ranks, so that the learning rate fits all of them.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # no notes about the CPU

import keras
import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

import hvdlite.keras as hvd

TEST_IMAGES = 360  # of 1797
WARMUP_EPOCHS = 2

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
    """This rank's share of `data`."""
    # hvdlite: each rank has its own part of the data, all of them as many images.
    images, labels = (part[: len(part) // hvd.size() * hvd.size()] for part in data)
    return images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]


def plan(args: argparse.Namespace) -> list[Any]:
    """What happens between the steps of `fit`."""

    def half_a_wave(epoch: float) -> float:
        done = (epoch - WARMUP_EPOCHS) / max(1, args.epochs - WARMUP_EPOCHS)
        return 0.5 * (1 + math.cos(math.pi * done))

    callbacks = [
        # hvdlite: start from the same weights everywhere.
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        # hvdlite: metrics are averaged over the ranks, for all callbacks that follow.
        hvd.callbacks.MetricAverageCallback(),
        # hvdlite: begin with the rate of one rank, which is that of a smaller batch.
        hvd.callbacks.LearningRateWarmupCallback(args.lr, WARMUP_EPOCHS, verbose=1),
        hvd.callbacks.LearningRateScheduleCallback(
            args.lr, half_a_wave, start_epoch=WARMUP_EPOCHS, staircase=False
        ),
    ]
    if args.checkpoint and hvd.rank() == 0:  # hvdlite: one rank writes for all.
        callbacks.append(
            keras.callbacks.ModelCheckpoint(
                args.checkpoint, monitor="val_accuracy", mode="max", save_best_only=True
            )
        )
    return callbacks


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to read digits.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="images a step, on all ranks")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--checkpoint", type=Path, help="the best model, a .keras file")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error("--epochs must be at least 1")

    hvd.init()  # hvdlite: who am I, and who else is there?
    keras.utils.set_random_seed(args.seed + hvd.rank())  # another dropout on each rank
    train, test = (share(data) for data in load())

    model = network()
    model.compile(
        # hvdlite: average the gradients of all ranks before each step.
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(args.lr)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    start = time.perf_counter()
    history = model.fit(
        *train,
        batch_size=max(1, args.batch_size // hvd.size()),
        epochs=args.epochs,
        validation_data=test,
        callbacks=plan(args),
        verbose=2 if hvd.rank() == 0 else 0,  # hvdlite: one rank speaks for all.
    ).history
    seconds = time.perf_counter() - start

    if hvd.rank() == 0:
        reached = history["val_accuracy"][-1]
        images_per_second = args.epochs * len(train[0]) * hvd.size() / seconds
        print(f"test accuracy {reached:.2%}, {images_per_second:.0f} images/s, ranks {hvd.size()}")


if __name__ == "__main__":
    main()
