"""tf_digits.py, in a job that ranks may leave and join while it trains.

    python examples/elastic_tf_digits.py                                           # one rank
    hvdlite-run -np 2 --min-np 1 -H localhost:2 python examples/elastic_tf_digits.py

Kill a rank (the script prints its process id): the others go on from the last commit, and a new
one takes its place. The lines marked "elastic:" are what tf_digits.py does not have. The data comes
with scikit-learn. A step works on the same number of images whatever the number of ranks.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # no notes about the CPU

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from tensorflow import keras

import hvdlite.tf as hvd

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


def accuracy(model: Any, test: Data) -> float:
    """The share of right answers on the test images of all ranks."""
    images, labels = (part[hvd.rank() :: hvd.size()] for part in test)
    answers = np.argmax(model(images, training=False), axis=1)
    right = np.array([np.sum(answers == labels), len(labels)], np.float64)
    right = hvd.allreduce(right, name="accuracy", op=hvd.Sum)
    return float(right[0] / right[1])


def training_step(model: Any, optimizer: Any) -> Any:
    """A traced function of images and labels; it serves any number of ranks."""
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(reduce_retracing=True)
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


# elastic: this function is called again after each change of the ranks, with the same state.
@hvd.elastic.run
def train(state: Any, step: Any, data: Data, test: Data, args: argparse.Namespace) -> None:
    """Train until all epochs are done."""
    images, labels = data
    share = max(1, args.batch_size // hvd.size())  # The size may be another one each time.
    while state.epoch < args.epochs:
        order = np.random.default_rng(args.seed + state.epoch).permutation(len(labels))
        start = time.perf_counter()
        while len(order) - state.done >= share * hvd.size():
            batch = order[state.done : state.done + share * hvd.size()]
            mine = batch[hvd.rank() :: hvd.size()]
            loss = step(images[mine], labels[mine])
            now = time.perf_counter()
            state.loss, state.seconds, start = float(loss), state.seconds + now - start, now
            state.done += len(batch)  # elastic: how many images of the epoch are done
            if state.done // args.batch_size % args.commit_every == 0:
                state.commit()  # elastic: what a failure goes back to
            else:
                state.check_host_updates()  # elastic: let new ranks in
        state.epoch, state.done = state.epoch + 1, 0
        state.accuracy = accuracy(state.model, test)
        state.commit()
        if hvd.rank() == 0:
            print(
                f"epoch {state.epoch:2}: loss {state.loss:.4f}, accuracy {state.accuracy:.2%}, "
                f"ranks {hvd.size()}",
                flush=True,
            )


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
    tf.config.threading.set_intra_op_parallelism_threads(1)  # so small a network gains nothing
    keras.utils.set_random_seed(args.seed + hvd.rank())  # another dropout on each rank
    data, test = load()
    model = network()
    steps = args.epochs * (len(data[1]) // args.batch_size)
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(args.lr, steps))
    # elastic: all that a rank needs to go on. No broadcast is needed: newcomers receive the state.
    state = hvd.elastic.TensorFlowKerasState(
        model, optimizer, epoch=0, done=0, loss=0.0, seconds=0.0, accuracy=0.0
    )
    train(state, training_step(model, optimizer), data, test, args)
    if hvd.rank() == 0:
        images_per_second = args.epochs * len(data[1]) / state.seconds
        print(
            f"test accuracy {state.accuracy:.2%}, {images_per_second:.0f} images/s, "
            f"ranks {hvd.size()}"
        )


if __name__ == "__main__":
    main()
