"""Parts of arrays, of which each rank holds another one: nodes of pytrees.

With ``shard_state=True`` an optimizer sees a `Shard` in the place of each parameter, and so its
state has one wherever it would have an array for each element of a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hvdlite.common.api.objects import array_forms
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.tensors.numpy_adapter import Array
from hvdlite.jax.trees import remembers, to_host

_KEY = jax.tree_util.GetAttrKey("values")


@dataclass(frozen=True)
class Cut:
    """How an array is cut: its elements in a row, in equal parts, with zeros behind the last one.

    The ranks of `process_set` were so many `members` when it was cut, this one at `position`.
    """

    shape: tuple[int, ...]
    position: int
    members: int
    process_set: ProcessSet

    @classmethod
    def of(cls, shape: tuple[int, ...], process_set: ProcessSet) -> Cut:
        """Return the cut of an array among the ranks that there are. Raises before `init`."""
        return cls(shape, process_set.rank() or 0, process_set.size(), process_set)

    @property
    def length(self) -> int:
        """How many elements a part has."""
        return -(-math.prod(self.shape) // self.members)

    def renewed(self) -> Cut:
        """Return the cut of the same array among the ranks that there are now."""
        return Cut.of(self.shape, self.process_set)

    def check(self) -> None:
        """Raise `RuntimeError` if the ranks are others than those among whom it was cut."""
        if self.renewed() != self:
            raise RuntimeError(
                f"shard_state=True: the state was divided among {self.members} ranks, of which "
                f"this was number {self.position}, and the ranks have changed: consolidate(state) "
                "before, and adopt(state, params) afterwards, or use hvd.elastic.JaxState, which "
                "keeps all of it in each commit"
            )

    def in_a_row(self, array: Any) -> Any:
        """Return all parts, one after the other: ``(length * members,)``."""
        flat = jnp.reshape(array, (-1,))
        return jnp.pad(flat, (0, self.length * self.members - flat.shape[0]))

    def own(self, array: Any) -> Any:
        """Return this rank's part of an array, of the host or of JAX: ``(length,)``."""
        begin = self.position * self.length
        part = array.reshape(-1)[begin : begin + self.length]
        pad = np.pad if isinstance(array, np.ndarray) else jnp.pad
        return pad(part, (0, self.length - part.shape[0]))

    def whole(self, row: Any) -> Any:
        """Return the array from all of its parts."""
        return row[: math.prod(self.shape)].reshape(self.shape)

    def alone(self, part: Array) -> Array:
        """Return an array of which this part is known, and all else zeros."""
        row = np.zeros(self.length * self.members, part.dtype)
        row[self.position * self.length :][: self.length] = part
        found: Array = self.whole(row)
        return found


class _Node:
    """A node of a pytree with one array, and with what is known of it when it is traced."""

    def __init__(self, values: Any, cut: Cut) -> None:
        self.values, self.cut = values, cut

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], Any]:
        """See `jax.tree_util.register_pytree_with_keys_class`."""
        return ((_KEY, self.values),), self.cut

    def tree_flatten(self) -> tuple[tuple[Any], Any]:
        """See `jax.tree_util.register_pytree_with_keys_class`."""
        return (self.values,), self.cut

    @classmethod
    def tree_unflatten(cls, cut: Any, children: Any) -> Any:
        """See `jax.tree_util.register_pytree_with_keys_class`."""
        (values,) = children
        return cls(values, cut)


@jax.tree_util.register_pytree_with_keys_class
class Shard(_Node):
    """The part of an array that this rank has.

    Of what is one for all elements of a parameter, such as a norm of it, it is all.
    """

    @property
    def is_cut(self) -> bool:
        """Whether it has an entry for each element of the part."""
        return tuple(np.shape(self.values)) == (self.cut.length,)

    def of_whole(self, array: Any) -> Shard:
        """Return this rank's part of another array, in the place of this one."""
        return Shard(jnp.asarray(self.cut.own(array) if self.is_cut else array), self.cut)


@jax.tree_util.register_pytree_with_keys_class
class Whole(_Node):
    """The whole array of a `Shard`, on the host."""

    def shard(self) -> Shard:
        """Return this rank's part of it."""
        return Shard(jnp.asarray(self.cut.own(self.values)), self.cut)


def is_shard(node: Any) -> bool:
    """Return whether a node of a pytree is a part of an array."""
    return isinstance(node, Shard)


def gather(shards: Mapping[str, Shard]) -> dict[str, Array]:
    """Return the whole arrays by the names of their parts; all ranks give the same names.

    Raises `RuntimeError` where the ranks have changed, and `HorovodInternalError` when one is lost.
    """
    handles = {}
    for name, shard in shards.items():
        if shard.is_cut:
            shard.cut.check()
            handles[name] = array_forms.allgather_async(
                to_host(shard.values), f"shard_state.{name}", shard.cut.process_set
            )
    return {
        name: shard.cut.whole(array_forms.synchronize(handles[name]))
        if name in handles
        else to_host(shard.values)
        for name, shard in shards.items()
    }


def consolidated(tree: Any) -> Any:
    """Return a pytree with whole arrays in the place of their parts; all ranks call it."""
    return _replaced(tree, gather, lambda array, _: jnp.asarray(array))


def replaced_shards(tree: Any, *, alone: bool) -> Any:
    """Return a pytree with a `Whole` in the place of each part that is cut; all ranks call it.

    `alone`: without the other ranks. Then all but this rank's part is zeros.
    """

    def of_own(shards: Mapping[str, Shard]) -> dict[str, Array]:
        return {name: each.cut.alone(to_host(each.values)) for name, each in shards.items()}

    return _replaced(tree, of_own if alone else gather, Whole, only_cut=True)


def _replaced(
    tree: Any,
    arrays_of: Callable[[Mapping[str, Shard]], Mapping[str, Array]],
    replacement: Callable[[Array, Cut], Any],
    *,
    only_cut: bool = False,
) -> Any:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_apart)
    named = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
    shards = {
        name: leaf for name, leaf in named if is_shard(leaf) and (leaf.is_cut or not only_cut)
    }
    arrays = arrays_of(shards)
    found = [
        replacement(arrays[name], leaf.cut) if name in shards else leaf for name, leaf in named
    ]
    return jax.tree_util.tree_unflatten(structure, found)


def recut(tree: Any) -> Any:
    """Return a pytree whose parts, and whole arrays, are of the ranks that there are now."""

    def one(node: Any) -> Any:
        if isinstance(node, _Node):
            return type(node)(node.values, node.cut.renewed())
        return node

    return jax.tree_util.tree_map(one, tree, is_leaf=_is_apart)


def _is_apart(node: Any) -> bool:
    """Return whether a node is one of these, or an optimizer, which only its maker can make."""
    return isinstance(node, _Node) or remembers(node)
