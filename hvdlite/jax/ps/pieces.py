"""Which transformations of optax can step over the pieces of arrays that servers have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hvdlite.jax.sharded_state.elementwise import differs

_SHAPES = ((3, 4), (5,), (2, 2, 2))
_LARGE = 4096, 4096  # None has memory for it: what keeps rows and columns of large matrices alone
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
    random = np.random.default_rng(2)
    values = [random.normal(size=shape).astype(np.float32) for shape in _SHAPES]
    if differs(optimizer, values, lambda arrays: _cut(arrays, whole), lambda pieces: pieces):
        return "a step over pieces of a pytree gives other values than one over all of it"
    state = jax.eval_shape(optimizer.init, jax.ShapeDtypeStruct(_LARGE, jnp.float32))
    shapes = {each.shape for each in jax.tree_util.tree_leaves(state)}
    if not whole and not shapes <= {(), _LARGE}:
        return "it keeps something that is neither one for each element nor one for all"
    return ""


def _cut(arrays: Sequence[Any], whole: bool) -> list[Any]:
    flat = np.concatenate([each.reshape(-1) for each in arrays])
    return [*arrays] if whole else [flat[:_HALF], flat[_HALF:]]
