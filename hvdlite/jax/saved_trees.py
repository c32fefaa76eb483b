"""What a `JaxState` has saved: the leaves of pytrees, on the host."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hvdlite.common.elastic.arrays import copied
from hvdlite.jax.sharded_state.shards import Whole, recut, replaced_shards
from hvdlite.jax.trees import Array, from_host, is_array, is_key, remembers, to_host

OPTIMIZER = "an optimizer"


@dataclass(frozen=True)
class Place:
    """Stands in a tree that is sent for a leaf that is not: an array, or an optimizer."""

    kind: str  # what ranks must have alike: of an array, its dtype and shape
    like: Any = None  # how to make an array of this kind: see `made`

    @classmethod
    def of(cls, leaf: Any, values: Array) -> Place:
        """Return the place of an array, which may be deleted by now, with these values."""
        impl = jax.random.key_impl(leaf) if is_key(leaf) else None
        like = type(leaf) if isinstance(leaf, np.generic) else isinstance(leaf, jax.Array)
        kind = f"{values.dtype.name} of shape {values.shape}"
        return cls(kind, (like, impl, values.dtype, values.shape))

    def made(self) -> tuple[Any, Array]:
        """Return a new leaf of the kind, and memory for its values."""
        like, impl, dtype, shape = self.like
        values = np.zeros(shape, dtype)
        if like is True:
            key = None if impl is None else jax.random.wrap_key_data(jnp.array(values), impl=impl)
            return (jnp.array(values) if key is None else key), values
        return (values[()] if isinstance(like, type) else values), values


class Saved:
    """The leaves of some attributes: copies of arrays on the host, and of all others.

    An optimizer is a leaf that stays as it is, but for what its compression has not sent. Where it
    can, it takes over the memory of arrays that were `kept`, when nothing can fail any more.

    Of a state that is divided among the ranks it has all, as the parts of ranks that leave would be
    lost; all ranks save then. Before they can, it has this rank's part alone, and `is_part`.
    """

    def __init__(self, values: Mapping[str, Any], kept: Sequence[Array], *, alone: bool) -> None:
        """Save some attributes; `alone`: without the other ranks."""
        tree = replaced_shards(dict(values), alone=alone)
        self.leaves, self.structure = jax.tree_util.tree_flatten(tree, is_leaf=remembers)
        self.is_part = alone and self.is_divided
        optimizers = [leaf for leaf in self.leaves if remembers(leaf)]
        others = [leaf for leaf in self.leaves if not remembers(leaf)]
        arrays = [to_host(leaf) for leaf in others if is_array(leaf)]
        self.objects = copy.deepcopy([leaf for leaf in others if not is_array(leaf)])
        self.unsent = [optimizer.compression_state() for optimizer in optimizers]
        self.arrays = [*map(copied, arrays, chain(kept, repeat(None)))]

    @property
    def is_divided(self) -> bool:
        """Whether each rank has another part of what was saved."""
        nodes = jax.tree_util.tree_unflatten(self.structure, self.leaves)
        return any(map(_is_whole, jax.tree_util.tree_leaves(nodes, is_leaf=_is_whole)))

    def restored(self) -> dict[str, Any]:
        """Return the attributes as they were, with new arrays."""
        arrays, objects = iter(self.arrays), iter(copy.deepcopy(self.objects))
        unsent = iter(self.unsent)
        leaves = []
        for leaf in self.leaves:
            if remembers(leaf):
                leaf.load_compression_state(next(unsent))
                leaves.append(leaf)
            else:
                leaves.append(from_host(next(arrays), leaf) if is_array(leaf) else next(objects))
        tree = jax.tree_util.tree_unflatten(self.structure, leaves)
        found: dict[str, Any] = jax.tree_util.tree_map(
            lambda node: node.shard() if _is_whole(node) else node,
            tree,
            is_leaf=lambda node: _is_whole(node) or remembers(node),
        )
        return found

    def enter_world(self) -> None:
        """Divide anew, among the ranks that there are now, what is divided.

        Raises `RuntimeError` for a part alone of what was divided among other ranks.
        """
        tree = jax.tree_util.tree_unflatten(self.structure, self.leaves)
        if self.is_part:
            for node in jax.tree_util.tree_leaves(tree, is_leaf=_is_whole):
                if _is_whole(node):
                    node.cut.check()
        self.leaves, self.structure = jax.tree_util.tree_flatten(recut(tree), is_leaf=remembers)

    def digests(self) -> dict[str, str]:
        """Return a digest of the paths of the leaves of each attribute, and of what is there.

        What has none, such as None or an empty list, counts as a leaf.
        """
        found = {}
        for name, tree in self.tree().items():
            leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_empty)
            paths = []
            for path, leaf in leaves:
                alone = type(leaf).__name__ if _is_empty(leaf) else ""
                word = leaf.kind if isinstance(leaf, Place) else alone
                paths.append((jax.tree_util.keystr(path), word))
            found[name] = hashlib.blake2b(repr(paths).encode(), digest_size=16).hexdigest()
        return found

    def tree(self) -> dict[str, Any]:
        """Return the attributes, with the objects that were saved and places for all else."""
        arrays, objects = iter(self.arrays), iter(self.objects)
        places = [
            Place(OPTIMIZER) if remembers(leaf)
            else Place.of(leaf, next(arrays)) if is_array(leaf)
            else next(objects)
            for leaf in self.leaves
        ]  # fmt: skip
        found: dict[str, Any] = jax.tree_util.tree_unflatten(self.structure, places)
        return found

    def adopt(self, tree: Mapping[str, Any]) -> None:
        """Take another tree, and its objects; arrays that are new, or of another kind, are zeros.

        It has the same optimizers in it.
        """
        own = dict(self._own_leaves())
        leaves, self.structure = jax.tree_util.tree_flatten_with_path(dict(tree))
        self.leaves, self.arrays, self.objects, self.unsent = [], [], [], []
        for path, leaf in leaves:
            if not isinstance(leaf, Place):
                self.leaves.append(leaf)
                self.objects.append(leaf)
                continue
            there = own.get((jax.tree_util.keystr(path), leaf.kind))
            found, values = leaf.made() if there is None else there
            self.leaves.append(found)
            (self.unsent if leaf.kind == OPTIMIZER else self.arrays).append(values)

    def kinds(self) -> dict[str, str]:
        """Return by the path of each array, and of each optimizer, what it is."""
        return {path: kind for (path, kind), _ in self._own_leaves()}

    def _own_leaves(self) -> Iterator[tuple[tuple[str, str], tuple[Any, Any]]]:
        """Yield path and kind of each array and optimizer, with the leaf and what is saved."""
        paths, _ = jax.tree_util.tree_flatten_with_path(self.tree())
        arrays, unsent = iter(self.arrays), iter(self.unsent)
        for (path, place), leaf in zip(paths, self.leaves, strict=True):
            if isinstance(place, Place):
                values = next(unsent if place.kind == OPTIMIZER else arrays)
                yield (jax.tree_util.keystr(path), place.kind), (leaf, values)


def _is_whole(node: Any) -> bool:
    return isinstance(node, Whole)


def _is_empty(node: Any) -> bool:
    return node is None or (isinstance(node, (dict, list, tuple)) and not node)
