"""Which transformations of optax can step over pieces of arrays, each with a state of its own.

One that looks at shapes, at norms or at several elements at once would make another step there,
without any error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

_SHAPES = ((3, 4), (5,), (2, 2, 2))
_LARGE = 4096, 4096  # None has memory for it: what keeps rows and columns of large matrices alone
_HUGE = 1e6  # times a gradient of such a size that it is clipped wherever something is
_HALF = 13  # of the elements of all shapes


def check_pieces(optimizer: optax.GradientTransformation, remedy: str, *, whole: bool) -> None:
    """Raise `ValueError` for a transformation that makes other steps over pieces.

    They are `whole` arrays of a pytree, or else flat parts of several. A few steps with small
    arrays are made to find out.
    """
    try:
        reason = _objection(optimizer, whole)
    except Exception as error:
        reason = f"a step over pieces of a pytree raises {type(error).__name__}: {error}"
    if reason:
        raise ValueError(f"this transformation of optax cannot be used: {reason}: {remedy}")


def _objection(optimizer: optax.GradientTransformation, whole: bool) -> str:
    """Return what a step over pieces does differently; empty where it does not."""
    random = np.random.default_rng(1)
    drawn = [[random.normal(size=shape).astype(np.float32) for shape in _SHAPES] for _ in range(4)]
    values, _, huge, broken = drawn
    huge[:] = [each * np.float32(_HUGE) for each in huge]
    broken[0][0, 0] = np.nan  # what rejects steps with such gradients looks at all of them
    together = _updates(optimizer, [values], [[each] for each in drawn[1:]])
    apart = _updates(optimizer, _cut(values, whole), [_cut(each, whole) for each in drawn[1:]])
    for one, other in zip(together, apart, strict=True):
        size = np.max(np.abs(one), where=np.isfinite(one), initial=0.0)
        if not np.allclose(one, other, rtol=1e-4, atol=1e-6 * size, equal_nan=True):
            return "a step over pieces of a pytree gives other values than one over all of it"
    state = jax.eval_shape(optimizer.init, jax.ShapeDtypeStruct(_LARGE, jnp.float32))
    shapes = {each.shape for each in jax.tree_util.tree_leaves(state)}
    if not whole and not shapes <= {(), _LARGE}:
        return "it keeps something that is neither one for each element nor one for all"
    return ""


def _cut(arrays: Sequence[Any], whole: bool) -> list[Any]:
    flat = np.concatenate([each.reshape(-1) for each in arrays])
    return [*arrays] if whole else [flat[:_HALF], flat[_HALF:]]


def _updates(
    optimizer: optax.GradientTransformation, pieces: Sequence[Any], steps: Sequence[Sequence[Any]]
) -> list[Any]:
    """Return the updates of each step, as one flat array, where each piece has its own state."""

    @jax.jit
    def train(values: list[Any], steps: Sequence[Any]) -> list[Any]:
        states = [optimizer.init(each) for each in values]
        found = []
        for gradients in steps:
            made = [optimizer.update(*each) for each in zip(gradients, states, values, strict=True)]
            updates, states = [each for each, _ in made], [state for _, state in made]
            values = [*map(optax.apply_updates, values, updates)]
            leaves = jax.tree_util.tree_leaves(updates)
            found.append(jnp.concatenate([leaf.reshape(-1) for leaf in leaves]))
        return found

    return [np.asarray(each) for each in train([*pieces], [*steps])]
