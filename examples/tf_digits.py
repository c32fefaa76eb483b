"""A small convolutional network that learns to read handwritten digits, on any number of ranks.

    python examples/tf_digits.py                       # one rank
    hvdlite-run -np 2 python examples/tf_digits.py     # two

A training loop of its own, with tf.GradientTape; keras_digits.py does the same with `fit`. The
lines marked "hvdlite:" are all that makes the script distributed. The data comes with scikit-learn.
A step works on the same number of images whatever the number of ranks, so that the learning rate
fits all of them.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # no notes about the CPU

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow import keras

import hvdlite.tf as hvd

TEST_IMAGES = 360  # of 1797


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


def load() -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """The digits, shuffled alike on every rank: what to train with, and what to test with."""
    digits = load_digits()
    images = np.asarray(digits.images, np.float32)[..., None] / 16
    labels = np.asarray(digits.target, np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    slices = tf.data.Dataset.from_tensor_slices
    return slices((images[train], labels[train])), slices((images[test], labels[test]))


def accuracy(model: Any, test: tf.data.Dataset) -> float:
    """The share of right answers on the test images of all ranks."""
    right = np.zeros(2)  # right answers, answers
    for images, labels in test:
        answers = np.argmax(model(images, training=False), axis=1)
        right += [np.sum(answers == labels), len(labels)]
    # hvdlite: a metric is summed over the ranks.
    right = hvd.allreduce(right, name="accuracy", op=hvd.Sum)
    return float(right[0] / right[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to read digits.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="images a step, on all ranks")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error("--epochs must be at least 1")

    hvd.init()  # hvdlite: who am I, and who else is there?
    tf.config.threading.set_intra_op_parallelism_threads(1)  # so small a network gains nothing
    keras.utils.set_random_seed(args.seed + hvd.rank())  # another dropout on each rank
    train, test = load()
    train = train.shuffle(len(train), seed=args.seed)  # alike on all ranks, anew in each epoch
    # hvdlite: each rank reads its own part of the data, all of them as many batches.
    train = hvd.data.shard(train, "drop")
    train = train.batch(max(1, args.batch_size // hvd.size()), drop_remainder=True)
    test = test.shard(hvd.size(), hvd.rank()).batch(256)

    model = network()
    optimizer = keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(args.lr, args.epochs * len(train))
    )
    optimizer.build(model.trainable_variables)
    # hvdlite: start from the same weights everywhere.
    hvd.broadcast_variables([*model.weights, *optimizer.variables], root_rank=0)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        # hvdlite: average the gradients of all ranks before each step.
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    seconds, reached = 0.0, 0.0
    for epoch in range(args.epochs):
        start = time.perf_counter()
        for images, labels in train:
            loss = step(images, labels)
        seconds += time.perf_counter() - start
        reached = accuracy(model, test)
        if hvd.rank() == 0:  # hvdlite: one rank speaks for all.
            print(f"epoch {epoch + 1:2}: loss {loss:.4f}, accuracy {reached:.2%}")

    if hvd.rank() == 0:
        images_per_second = args.epochs * len(train) * args.batch_size / seconds
        print(f"test accuracy {reached:.2%}, {images_per_second:.0f} images/s, ranks {hvd.size()}")


if __name__ == "__main__":
    main()
