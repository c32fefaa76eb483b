"""Which transformations of optax can update parts of arrays, each part with a state of its own.

One that looks at shapes, at norms or at several elements at once would make another step there,
without any error. A few steps with small arrays are made to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

_HUGE = 1e6  # times a gradient of such a size that it is clipped wherever something is


def differs(
    optimizer: optax.GradientTransformation,
    values: Any,
    cut: Callable[[Any], Sequence[Any]],
    join: Callable[[Sequence[Any]], Any],
) -> bool:
    """Return whether updates of parts are others than those of a whole pytree of arrays.

    `cut` returns the parts of such a pytree, and `join` puts those of updates together: as a pytree
    with the same elements in the same order. Raises what the transformation raises.
    """
    random = np.random.default_rng(1)
    steps = [sample(values, random, scale) for scale in (1.0, _HUGE, 1.0)]
    steps.append(_broken(steps[-1]))
    whole = _updates(optimizer, values, steps)
    cut_steps = [cut(step) for step in steps]
    parts = [
        _updates(optimizer, part, [step[number] for step in cut_steps])
        for number, part in enumerate(cut(values))
    ]
    for one, others in zip(whole, zip(*parts, strict=True), strict=True):
        numbers, found = _flat(one), _flat(join(others))
        size = np.max(np.abs(numbers), where=np.isfinite(numbers), initial=0.0)
        if not np.allclose(numbers, found, rtol=1e-4, atol=1e-6 * size, equal_nan=True):
            return True
    return False


def sample(like: Any, random: np.random.Generator, scale: float = 1.0) -> Any:
    """Return a pytree of arrays of the same shapes and kinds of numbers, with random values."""

    def one(leaf: Any) -> Any:
        values = random.normal(size=leaf.shape) * scale
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            return jnp.asarray(values * (1 + 0.5j), jnp.complex64)
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray(values, jnp.float32 if is_float else leaf.dtype)

    return jax.tree_util.tree_map(one, like)


def _broken(gradients: Any) -> Any:
    """Return gradients of which one is none: what rejects such steps looks at all of them."""
    leaves, structure = jax.tree_util.tree_flatten(gradients)
    for number, leaf in enumerate(leaves):
        if leaf.size and jnp.issubdtype(leaf.dtype, jnp.inexact):
            leaves[number] = leaf.reshape(-1).at[0].set(jnp.nan).reshape(leaf.shape)
            break
    return structure.unflatten(leaves)


def _updates(
    optimizer: optax.GradientTransformation, values: Any, steps: Sequence[Any]
) -> list[Any]:
    """Return the updates of each step."""
    state = optimizer.init(values)
    found = []
    for gradients in steps:
        updates, state = optimizer.update(gradients, state, values)
        values = optax.apply_updates(values, updates)
        found.append(updates)
    return found


def _flat(tree: Any) -> Any:
    leaves = [np.asarray(leaf).reshape(-1) for leaf in jax.tree_util.tree_leaves(tree)]
    return np.concatenate([*leaves, np.zeros(0)])
