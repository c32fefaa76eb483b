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
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from hvdlite.common.api.objects import broadcast_object
from hvdlite.common.base.errors import DEPARTED
from hvdlite.common.elastic.arrays import broadcast_arrays
from hvdlite.common.elastic.run import is_loss, run_until
from hvdlite.common.elastic.source import check_same_tensors, sync_source
from hvdlite.common.elastic.state import ObjectState
from hvdlite.common.plain.comparison import Compared, of_array
from hvdlite.common.runtime import worlds
from hvdlite.common.runtime.basics import rank
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
        return is_loss(error)
    return worlds.world_is_broken() or (worlds.elastic() and DEPARTED in str(error))


class _Saved:
    """The leaves of some attributes: copies of arrays on the host, and of all others.

    An optimizer is a leaf that stays as it is, but for what its compression has not sent.
    """

    def __init__(self, values: Mapping[str, Any], kept: list[Array]) -> None:
        self.leaves, self.structure = jax.tree_util.tree_flatten(dict(values), is_leaf=remembers)
        self.arrays: list[Array] = []
        self.objects: list[Any] = []
        self.unsent: list[Any] = []
        for leaf in self.leaves:
            if remembers(leaf):
                self.unsent.append(leaf.compression_state())
                continue
            if not is_array(leaf):
                self.objects.append(leaf)
                continue
            value = to_host(leaf)
            number = len(self.arrays)
            if number < len(kept) and (kept[number].shape, kept[number].dtype) == (
                value.shape,
                value.dtype,
            ):
                np.copyto(kept[number], value)
                self.arrays.append(kept[number])
            else:
                self.arrays.append(value.copy())
        self.objects = copy.deepcopy(self.objects)


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
            tree = jax.tree_util.tree_unflatten(saved.structure, saved.leaves)
            kinds = {
                name: f"{values.dtype.name} of shape {values.shape}"
                for (name, _), values in zip(named_arrays(tree), saved.arrays, strict=True)
            }
            check_same_tensors(kinds, "arrays", source)
            saved.arrays = broadcast_arrays(saved.arrays, "elastic.arrays", source)
        saved.objects = self._from_source(saved.objects)
        self.restore()

    def _enter_world(self) -> None:
        """Forget compiled programs: they contain places and numbers of ranks."""
        super()._enter_world()
        jax.clear_caches()

    def _tensors_to_compare(self) -> Iterator[Compared]:
        for name in self._saved_state:
            for path, leaf in named_arrays(getattr(self, name), name):
                yield of_array(path, to_host(leaf))


__all__ = ["JaxState", "run"]
