"""Checkpoints of arrays of JAX.

hvd.checkpoint.save("checkpoint", {"params": params, "opt_state": opt_state, "step": 100})
state = hvd.checkpoint.load("checkpoint", {"params": params, "opt_state": opt_state, "step": 0})

Arrays do not change: what `load` returns has the new ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from hvdlite.checkpoint import compression, public
from hvdlite.checkpoint.public import *  # noqa: F403
from hvdlite.checkpoint.public import CheckpointForms
from hvdlite.checkpoint.tensors import Array, Context, Owner, Tensors
from hvdlite.jax.sharded_state.shards import gather, is_shard
from hvdlite.jax.trees import from_host, is_key, remembers, to_host


class JaxTensors(Tensors):
    """Arrays of JAX beside those of numpy."""

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, jax.Array) or super().is_tensor(value)

    def kind(self, tensor: Any) -> tuple[str, tuple[int, ...]]:
        return super().kind(to_host(tensor) if is_key(tensor) else tensor)

    def array(self, tensor: Any) -> Array:
        return np.asarray(to_host(tensor))

    def owner(self, thing: Any, context: Context) -> Owner | None:
        """Return the parts of a node of a pytree, such as a state of optax or flax.

        Dicts, lists and tuples have names already. Of a distributed optimizer, that is what its
        compression has not sent; of a part of an array, the whole one.
        """
        if remembers(thing):
            return _compression(thing, context)
        if is_shard(thing):
            whole = self.whole.get(id(thing))
            if whole is None:
                raise ValueError(
                    f"each rank has another part of '{context.prefix.removesuffix('.')}', by "
                    "shard_state=True: give optimizer.consolidate(state)"
                )
            return Owner(thing, whole, thing.of_whole, is_replaced=True)
        found = _children(thing)
        if found is None:
            return super().owner(thing, context)
        children, structure = found
        # Dicts in it are changed while they are loaded, and what holds them may be immutable.
        tree = {name: _with_new_dicts(child) for name, child in children.items()}
        return Owner(
            thing,
            tree,
            lambda found: jax.tree_util.tree_unflatten(structure, [*found.values()]),
            is_replaced=True,
        )

    def parts(self, thing: Any) -> Mapping[Any, Any]:
        """Return what is in a node of a pytree, by its names."""
        found = _children(thing)
        return {} if found is None else found[0]

    def gather_of(self, thing: Any, name: str) -> Callable[[], Any] | None:
        """Return what gathers an array of which each rank has a part, by ``shard_state=True``."""
        if not is_shard(thing):
            return None
        return lambda: gather({name: thing})[name]

    def store(self, tensor: Any, values: Array) -> Any:
        """Return a new array of JAX in the place of one; see `Tensors`."""
        return (
            from_host(values, tensor)
            if isinstance(tensor, jax.Array)
            else super().store(tensor, values)
        )


def _compression(optimizer: Any, context: Context) -> Owner:
    entries, layouts = compression.described(
        optimizer.compression_state(), context.manifest, context.prefix
    )

    def install(loaded: dict[Any, Any]) -> None:
        if entries:
            optimizer.load_compression_state(compression.restored(loaded[compression.KEY]))

    return Owner(optimizer, dict(entries), install, layouts=layouts)


def _children(thing: Any) -> tuple[dict[Any, Any], Any] | None:
    """Return what is in a node of a pytree, and its structure; None for a leaf, or a container."""
    if isinstance(thing, (dict, list, type(None))) or type(thing) is tuple:
        return None
    if jax.tree_util.all_leaves([thing]):
        return None
    children, structure = jax.tree_util.tree_flatten_with_path(
        thing, is_leaf=lambda each: each is not thing
    )
    return {_key(path): child for path, child in children}, structure


def _with_new_dicts(tree: Any) -> Any:
    if isinstance(tree, dict):
        new = copy.copy(tree)
        new.update({key: _with_new_dicts(each) for key, each in tree.items()})
        return new
    return type(tree)(map(_with_new_dicts, tree)) if type(tree) in (list, tuple) else tree


def _key(path: Any) -> Any:
    """Return the name or the number of a part."""
    (entry,) = path
    return next(getattr(entry, word) for word in ("name", "key", "idx") if hasattr(entry, word))


globals().update(public.functions_of(CheckpointForms(JaxTensors())))
__all__ = [*public.__all__]  # noqa: PLE0604 - they are strings
