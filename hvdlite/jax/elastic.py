"""Elastic training with JAX: go on when ranks are lost, and let new ones join.

@hvd.elastic.run
def train(state):
    while state.step < steps:
        state.params, state.opt_state = train_step(state.params, state.opt_state, batch(state.step))
        state.step += 1
        state.commit()

train(hvd.elastic.JaxState(params=params, opt_state=opt_state, step=0))
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import zip_longest
from typing import Any, TypeVar

import jax
import numpy as np

from hvdlite.common.api.objects import allgather_object, broadcast_object
from hvdlite.common.base.errors import DEPARTED
from hvdlite.common.elastic.arrays import broadcast_arrays
from hvdlite.common.elastic.run import is_loss, run_until
from hvdlite.common.elastic.source import Source, check_same_tensors, sync_source
from hvdlite.common.elastic.state import ObjectState
from hvdlite.common.plain.comparison import Compared, of_array
from hvdlite.common.runtime import worlds
from hvdlite.common.runtime.basics import rank
from hvdlite.jax.order import forget_programs, wait_for_programs
from hvdlite.jax.trees import Array, from_host, is_array, named_arrays, remembers, to_host

R = TypeVar("R")


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Return `func` as elastic training runs it: ``func(state, *args, **kwargs)``.

    After a change of the job's ranks the function is called again, with the state that all of them
    share. What it returns is returned, and errors of the script are raised. Errors of compiled
    programs are those of the script unless this rank's world is over.
    """
    return run_until(func, is_loss_in_jax)


def is_loss_in_jax(error: Exception) -> bool:
    """Return whether an error means that the world is over, and not that the script is wrong.

    A program fails with an error of JAX; whether a rank was lost is then what the engine knows,
    whatever the text says.
    """
    if not isinstance(error, jax.errors.JaxRuntimeError):
        lost = is_loss(error)
    else:
        lost = worlds.world_is_broken() or (worlds.elastic() and DEPARTED in str(error))
    if lost and worlds.world_is_broken():
        wait_for_programs()  # What they start after this would be started in the next world.
    return lost


class _Place(Enum):
    """Stands in a tree that is sent for a leaf that each rank has itself."""

    ARRAY = 1
    OPTIMIZER = 2


class _Saved:
    """The leaves of some attributes: copies of arrays on the host, and of all others.

    An optimizer is a leaf that stays as it is, but for what its compression has not sent. Where it
    can, it takes over the memory of arrays that were `kept`, when nothing can fail any more.
    """

    def __init__(self, values: Mapping[str, Any], kept: Sequence[Array]) -> None:
        self.leaves, self.structure = jax.tree_util.tree_flatten(dict(values), is_leaf=remembers)
        optimizers = [leaf for leaf in self.leaves if remembers(leaf)]
        others = [leaf for leaf in self.leaves if not remembers(leaf)]
        arrays = [to_host(leaf) for leaf in others if is_array(leaf)]
        self.objects = copy.deepcopy([leaf for leaf in others if not is_array(leaf)])
        self.unsent = [optimizer.compression_state() for optimizer in optimizers]
        self.arrays = [
            _copied_to(memory, values)
            for memory, values in zip_longest(kept[: len(arrays)], arrays)
        ]

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
            _Place.OPTIMIZER if remembers(leaf)
            else _Place.ARRAY if is_array(leaf)
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
        self.objects = [leaf for leaf in leaves if not isinstance(leaf, _Place)]
        own = {_Place.ARRAY: arrays, _Place.OPTIMIZER: optimizers}
        self.leaves = [next(own[leaf]) if isinstance(leaf, _Place) else leaf for leaf in leaves]


def _is_empty(node: Any) -> bool:
    return node is None or (isinstance(node, (dict, list, tuple)) and not node)


def _kinds(saved: _Saved) -> dict[str, str]:
    """Return what the ranks must have alike: by the path of a leaf, what it is."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(saved.tree())
    arrays = iter(saved.arrays)
    kinds = {}
    for path, leaf in leaves:
        if leaf is _Place.ARRAY:
            values = next(arrays)
            kinds[jax.tree_util.keystr(path)] = f"{values.dtype.name} of shape {values.shape}"
        elif leaf is _Place.OPTIMIZER:
            kinds[jax.tree_util.keystr(path)] = "an optimizer"
    return kinds


def _copied_to(memory: Array | None, values: Array) -> Array:
    if memory is None or (memory.shape, memory.dtype) != (values.shape, values.dtype):
        copied: Array = values.copy()
        return copied
    np.copyto(memory, values)
    return memory


class JaxState(ObjectState):
    """The state of training with JAX: each keyword becomes an attribute that is tracked.

    Values are pytrees: parameters, states of optax, states of flax, keys of random numbers, numbers
    and other objects. Of a `DistributedOptimizer`, what its compression has not sent is saved, and
    each rank keeps its own. Arrays are copied to memory of the host in each save, so that a program
    may get them to overwrite (``donate_argnums``), and come back as new ones. Other leaves are
    copied as in `ObjectState`. Programs are compiled anew in another world, as they contain the
    rank and the number of ranks. Raises as `ObjectState` does, and `ValueError` in a sync where
    ranks have other arrays.
    """

    _saved: _Saved

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(broadcast_object, rank, **kwargs)

    def _copies(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Keep copies of the leaves, and return the names of the attributes."""
        kept = self._saved.arrays if hasattr(self, "_saved") else []
        try:
            self._saved = _Saved(values, kept)
        except TypeError:
            super()._copies(dict(values.items()))
            raise
        return dict.fromkeys(values)

    def restore(self) -> None:
        """Set all attributes to copies of what was saved last."""
        saved = self._saved
        arrays, objects = iter(saved.arrays), iter(copy.deepcopy(saved.objects))
        unsent = iter(saved.unsent)
        leaves = []
        for leaf in saved.leaves:
            if remembers(leaf):
                leaf.load_compression_state(next(unsent))
                leaves.append(leaf)
            else:
                leaves.append(from_host(next(arrays), leaf) if is_array(leaf) else next(objects))
        self._set_attributes(jax.tree_util.tree_unflatten(saved.structure, leaves))

    def sync(self) -> None:
        """Give all ranks what rank 0 saved last: as their attributes, and as their last save."""
        source, saved = sync_source(), self._saved
        if source.takes_part:
            check_same_tensors(_kinds(saved), "arrays", source)
            saved.arrays = broadcast_arrays(saved.arrays, "elastic.arrays", source)
            self._sync_structure(source)
        saved.objects = self._from_source(saved.objects)
        self.restore()

    def _sync_structure(self, source: Source) -> None:
        """Take from the root those attributes that have other leaves there, such as a longer list.

        All others keep what this rank has in the nodes of its trees, such as functions.
        """
        of_ranks = allgather_object(self._saved.digests(), "elastic.structure", source.process_set)
        names = {name for digests in of_ranks for name in digests}
        differing = {name for name in names if len({each.get(name) for each in of_ranks}) > 1}
        if not differing:
            return
        own = self._saved.tree()
        sent = self._from_source({name: own[name] for name in own if name in differing})
        kept = {name: tree for name, tree in own.items() if name not in differing}
        self._saved.adopt({**kept, **sent})
        self._saved_state = dict.fromkeys({**kept, **sent})

    def _enter_world(self) -> None:
        """Forget compiled programs: they contain places and numbers of ranks."""
        super()._enter_world()
        forget_programs()

    def _tensors_to_compare(self) -> Iterator[Compared]:
        for name in self._saved_state:
            for path, leaf in named_arrays(getattr(self, name), name):
                yield of_array(path, to_host(leaf))


__all__ = ["JaxState", "run"]
