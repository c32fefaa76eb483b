"""A process of a cluster that trains a small network of JAX, whose steps servers make."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

STEPS = 6


def new_params() -> Any:
    random = np.random.default_rng(0)
    return {
        "dense": {
            "kernel": jnp.asarray(random.normal(size=(6, 40)), jnp.float32),
            "bias": jnp.zeros(40),
        },
        "out": jnp.asarray(random.normal(size=(40, 3)), jnp.float32),
        "scale": jnp.ones(()),
    }


@jax.jit
@jax.grad
def _gradients(params: Any, inputs: Any, labels: Any) -> Any:
    hidden = jax.nn.relu(inputs @ params["dense"]["kernel"] + params["dense"]["bias"])
    logits = params["scale"] * (hidden @ params["out"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def gradients_of(params: Any, step: int, worker: int) -> Any:
    """Return the gradients of a worker in a step, which are of the weights."""
    random = np.random.default_rng([step, worker])
    inputs = random.normal(size=(8, 6)).astype(np.float32)
    return _gradients(params, inputs, random.integers(0, 3, 8))


def train_in_one(optimizer: Any, params: Any, steps: Iterable[int], workers: int = 2) -> Any:
    """Return the weights of one process that has the gradients of all workers."""
    state = optimizer.init(params)
    for step in steps:
        every = [gradients_of(params, step, worker) for worker in range(workers)]
        mean = jax.tree_util.tree_map(lambda *each: sum(each) / workers, *every)
        updates, state = optimizer.update(mean, state, params)
        params = optax.apply_updates(params, updates)
    return params


def main(folder: Path) -> None:
    from hvdlite.jax import ps

    ps.init()
    optimizer = ps.DistributedOptimizer(optax.adam(0.05), new_params())
    params = optimizer.pull()
    for step in range(STEPS):
        params = optimizer.step(gradients_of(params, step, ps.rank()))
    ps.push("ones", jnp.ones(3))
    ps.barrier()
    np.testing.assert_array_equal(ps.pull("ones"), [2.0] * 3)
    leaves = [np.asarray(each, np.float32) for each in jax.tree_util.tree_leaves(params)]
    np.savez(folder / f"worker{ps.rank()}.npz", *leaves)
    ps.barrier()
    if ps.rank() == 0:
        ps.save(folder / "saved")
    ps.barrier()
    lost = optimizer.step(jax.tree_util.tree_map(jnp.ones_like, params))
    ps.barrier()  # What a worker pulls after another one's load is no more what it lost.
    ps.load(folder / "saved")
    again = optimizer.pull()
    pairs = zip(*map(jax.tree_util.tree_leaves, (params, again, lost)), strict=True)
    assert all((one == two).all() and (one != other).any() for one, two, other in pairs)
    ps.barrier()
    ps.shutdown()
