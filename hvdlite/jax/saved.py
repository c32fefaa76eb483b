"""What a `JaxState` has saved: the leaves of pytrees, on the host."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import zip_longest
from typing import Any

import jax
import numpy as np

from hvdlite.jax.shards import Whole, recut, replaced_shards
from hvdlite.jax.trees import Array, from_host, is_array, remembers, to_host


class Place(Enum):
    """Stands in a tree that is sent for a leaf that each rank has itself."""

    ARRAY = 1
    OPTIMIZER = 2


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
        self.arrays = [
            _copied_to(memory, values)
            for memory, values in zip_longest(kept[: len(arrays)], arrays)
        ]

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
        """Return a digest of the paths of the leaves of each attribute.

        What has none, such as None or an empty list, counts as a leaf.
        """
        found = {}
        for name, tree in self.tree().items():
            leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_empty)
            paths = [
                (jax.tree_util.keystr(path), type(leaf).__name__ if _is_empty(leaf) else "")
                for path, leaf in leaves
            ]
            found[name] = hashlib.blake2b(repr(paths).encode(), digest_size=16).hexdigest()
        return found

    def tree(self) -> dict[str, Any]:
        """Return the attributes, with the objects that were saved and places for all else."""
        objects = iter(self.objects)
        places = [
            Place.OPTIMIZER if remembers(leaf)
            else Place.ARRAY if is_array(leaf)
            else next(objects)
            for leaf in self.leaves
        ]  # fmt: skip
        found: dict[str, Any] = jax.tree_util.tree_unflatten(self.structure, places)
        return found

    def adopt(self, tree: Mapping[str, Any]) -> None:
        """Take another tree, with the same arrays and optimizers in it, and its objects."""
        arrays = iter([each for each in self.leaves if is_array(each)])
        optimizers = iter([each for each in self.leaves if remembers(each)])
        leaves, self.structure = jax.tree_util.tree_flatten(dict(tree))
        self.objects = [leaf for leaf in leaves if not isinstance(leaf, Place)]
        own = {Place.ARRAY: arrays, Place.OPTIMIZER: optimizers}
        self.leaves = [next(own[leaf]) if isinstance(leaf, Place) else leaf for leaf in leaves]


def _is_whole(node: Any) -> bool:
    return isinstance(node, Whole)


def _is_empty(node: Any) -> bool:
    return node is None or (isinstance(node, (dict, list, tuple)) and not node)


def kinds(saved: Saved) -> dict[str, str]:
    """Return what the ranks must have alike: by the path of a leaf, what it is."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(saved.tree())
    arrays = iter(saved.arrays)
    kinds = {}
    for path, leaf in leaves:
        if leaf is Place.ARRAY:
            values = next(arrays)
            kinds[jax.tree_util.keystr(path)] = f"{values.dtype.name} of shape {values.shape}"
        elif leaf is Place.OPTIMIZER:
            kinds[jax.tree_util.keystr(path)] = "an optimizer"
    return kinds


def _copied_to(memory: Array | None, values: Array) -> Array:
    if memory is None or (memory.shape, memory.dtype) != (values.shape, values.dtype):
        copied: Array = values.copy()
        return copied
    np.copyto(memory, values)
    return memory
