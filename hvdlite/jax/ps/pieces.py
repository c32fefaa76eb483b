"""Which transformations of optax can step over the pieces of arrays that servers have."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hvdlite.jax.sharded_state.elementwise import differs
from hvdlite.ps.layouts.blocks import Array

_SHAPES = ((3, 4), (5,), (2, 2, 2))
_LARGE = 4096, 4096  # None has memory for it: what keeps rows and columns of large matrices alone
_HALF = 13  # of the elements of all shapes


def check_pieces(
    optimizer: optax.GradientTransformation, params: Any, remedy: str, *, whole: bool
) -> None:
    """Raise `ValueError` for a transformation that makes other steps over pieces of `params`.

    They are `whole` arrays of a pytree, or else flat parts of several. A few steps with small
    arrays are made to find out, also with a pytree of the same structure: labels and masks may
    know its paths.
    """
    try:
        reason = _objection(optimizer, params, whole)
    except Exception as error:
        reason = f"a step over pieces of a pytree raises {type(error).__name__}: {error}"
    if reason:
        raise ValueError(f"this transformation of optax cannot be used: {reason}: {remedy}")


def _objection(optimizer: optax.GradientTransformation, params: Any, whole: bool) -> str:
    """Return what a step over pieces does differently; empty where it does not."""
    random = np.random.default_rng(2)

    def drawn(shape: tuple[int, ...]) -> Array:
        return random.normal(size=shape).astype(np.float32)

    values = [*map(drawn, _SHAPES)]
    # Few shapes: compiling for many of them takes seconds.
    alike = jax.tree_util.tree_map(lambda leaf: drawn((2,) * np.ndim(leaf)), params)
    if differs(optimizer, values, partial(_cut, whole=whole), list):
        return "a step over pieces of a pytree gives other values than one over all of it"
    if differs(optimizer, alike, _renamed, list):
        return "its steps depend on the paths of arrays in the pytree, which servers do not know"
    state = jax.eval_shape(optimizer.init, jax.ShapeDtypeStruct(_LARGE, jnp.float32))
    shapes = {each.shape for each in jax.tree_util.tree_leaves(state)}
    if not whole and not shapes <= {(), _LARGE}:
        return "it keeps something that is neither one for each element nor one for all"
    return ""


def _cut(arrays: Sequence[Any], *, whole: bool) -> list[Any]:
    flat = np.concatenate([each.reshape(-1) for each in arrays])
    return [*arrays] if whole else [flat[:_HALF], flat[_HALF:]]


def _renamed(tree: Any) -> list[Any]:
    """Return the arrays of a pytree in another one, in which all have other paths."""
    return [{f"array {n:09}": each for n, each in enumerate(jax.tree_util.tree_leaves(tree))}]
