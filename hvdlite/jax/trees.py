"""Leaves of pytrees as arrays of the host, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array, of JAX or of numpy."""
    if isinstance(leaf, np.ndarray):
        return not leaf.dtype.hasobject
    return isinstance(leaf, (jax.Array, np.generic))


def remembers(node: Any) -> bool:
    """Return whether a node of a pytree is an optimizer with a state of its compression."""
    return hasattr(node, "compression_state")


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is a key of random numbers that knows its kind: `jax.random.key`."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def to_host(leaf: Any) -> Array:
    """Return the values, which may share the memory of the leaf."""
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def from_host(values: Array, like: Any) -> Any:
    """Return a leaf of the kind of `like`, with a copy of these values, where `like` is."""
    if not isinstance(like, jax.Array):
        return values.copy() if isinstance(like, np.ndarray) else values[()]
    if is_key(like):
        return jax.random.wrap_key_data(jnp.array(values), impl=jax.random.key_impl(like))
    return jax.device_put(jnp.array(values), None if like.is_deleted() else like.sharding)
