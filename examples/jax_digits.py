"""A small network of JAX and optax that learns to read handwritten digits, on any number of ranks.

    python examples/jax_digits.py                       # one rank
    hvdlite-run -np 2 python examples/jax_digits.py     # two

The lines marked "hvdlite:" are all that makes the script distributed. The data comes with
scikit-learn. A step works on the same number of images whatever the number of ranks, so that the
learning rate fits all of them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import hvdlite.jax as hvd

TEST_IMAGES = 360  # of 1797
SIZES = (64, 512, 256, 10)


def initial(key: Any) -> list[dict[str, Any]]:
    """The weights of dense layers: images (B, 64) to scores (B, 10)."""
    keys = jax.random.split(key, len(SIZES) - 1)
    return [
        {"w": jax.random.normal(key, (rows, columns)) * (2 / rows) ** 0.5, "b": jnp.zeros(columns)}
        for key, rows, columns in zip(keys, SIZES[:-1], SIZES[1:], strict=True)
    ]


def scores(params: list[dict[str, Any]], images: Any) -> Any:
    """The scores of images (B, 64) for each digit: (B, 10)."""
    for layer in params[:-1]:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return images @ params[-1]["w"] + params[-1]["b"]


def batches(count: int, batch: int, epoch: int) -> Iterator[np.ndarray[Any, Any]]:
    """This rank's share of an epoch: the numbers of the images of each step."""
    order = np.random.default_rng(epoch).permutation(count)  # Alike on every rank.
    whole = len(order) // (batch * hvd.size()) * batch * hvd.size()
    # hvdlite: each rank reads its own part of the data.
    own = order[:whole].reshape(-1, hvd.size(), batch)[:, hvd.rank()]
    yield from own


def main() -> None:
    """Train, and print what each epoch has come to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of a step, on all ranks")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error("--epochs must be at least 1")
    hvd.init()  # hvdlite: who am I, and who else is there?

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))  # Alike on every rank.
    images = np.float32(digits.data)[order] / 16
    labels = np.int32(digits.target)[order]
    test, train = images[:TEST_IMAGES], images[TEST_IMAGES:]

    # hvdlite: average the gradients of all ranks, while the rest of backward runs.
    rates = optax.cosine_decay_schedule(2e-3, args.epochs * (len(train) // args.batch_size))
    optimizer = hvd.DistributedOptimizer(optax.adam(rates))
    # hvdlite: start from the weights of rank 0.
    params = hvd.broadcast_parameters(initial(jax.random.key(0)))
    state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, images: Any, labels: Any) -> tuple[Any, Any, Any]:
        def loss(params: Any) -> Any:
            each = optax.softmax_cross_entropy_with_integer_labels(scores(params, images), labels)
            return each.mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    start, seen = time.perf_counter(), 0
    for epoch in range(args.epochs):
        losses = []
        for numbers in batches(len(train), args.batch_size // hvd.size(), epoch):
            own = train[numbers], labels[TEST_IMAGES:][numbers]
            params, state, value = step(params, state, *own)
            losses.append(value)
            seen += len(numbers) * hvd.size()
        # hvdlite: the mean over all ranks.
        mean = hvd.allreduce(jnp.mean(jnp.array(losses)), name="loss")
        right = (scores(params, test).argmax(1) == labels[:TEST_IMAGES]).mean()
        if hvd.rank() == 0:  # hvdlite: one rank talks.
            print(f"epoch {epoch + 1}: loss {mean:.4f}, test accuracy {right:.1%}", flush=True)
    if hvd.rank() == 0:
        speed = seen / (time.perf_counter() - start)
        print(f"test accuracy {100 * right:.1f}%, {speed:.0f} images/s, ranks {hvd.size()}")


if __name__ == "__main__":
    main()
