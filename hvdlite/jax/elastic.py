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

from hvdlite.common.api.objects import allgather_object, broadcast_object
from hvdlite.common.base.errors import DEPARTED
from hvdlite.common.elastic.arrays import broadcast_arrays
from hvdlite.common.elastic.run import is_loss, run_until
from hvdlite.common.elastic.source import Source, check_same_tensors, sync_source
from hvdlite.common.elastic.state import ObjectState
from hvdlite.common.runtime import worlds
from hvdlite.common.runtime.basics import rank
from hvdlite.common.tensors.comparison import Compared, of_array
from hvdlite.jax.order import forget_programs, wait_for_all_programs
from hvdlite.jax.saved_trees import OPTIMIZER, Saved
from hvdlite.jax.sharded_state.shards import is_shard
from hvdlite.jax.trees import is_array, to_host

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
        wait_for_all_programs()  # What they start after this would be started in the next world.
    return lost


class JaxState(ObjectState):
    """The state of training with JAX: each keyword becomes an attribute that is tracked.

    Values are pytrees: parameters, states of optax, states of flax, keys of random numbers, numbers
    and other objects. Of a `DistributedOptimizer`, what its compression has not sent is saved, and
    each rank keeps its own. Arrays are copied to memory of the host in each save, so that a program
    may get them to overwrite (``donate_argnums``), and come back as new ones. Other leaves are
    copied as in `ObjectState`. A state of ``shard_state=True`` is gathered from all ranks in each
    save, and divided anew in another world. Programs are compiled anew there, as they contain the
    rank and the number of ranks. Raises as `ObjectState` does, and `ValueError` in the first sync
    of a job where ranks have other arrays.
    """

    _saved: Saved
    # Whether all ranks have agreed about the state, and so save it at the same points.
    _is_synced = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(broadcast_object, rank, **kwargs)

    def _copies(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Keep copies of the leaves, and return the names of the attributes."""
        kept = self._saved.arrays if hasattr(self, "_saved") else []
        try:
            self._saved = Saved(values, kept, alone=not self._is_synced)
        except TypeError:
            super()._copies(dict(values.items()))
            raise
        return dict.fromkeys(values)

    def restore(self) -> None:
        """Set all attributes to copies of what was saved last."""
        self._set_attributes(self._saved.restored())

    def sync(self) -> None:
        """Give all ranks what the root saved last: as their attributes, and as their last save.

        Where that rank is lost in between, the last save here stays what it was.
        """
        source = sync_source()
        if source.takes_part and self._saved.is_divided:
            # Save all of a divided state, where no rank has done so since it was made.
            of_ranks = allgather_object(
                (rank(), self._saved.is_part), "elastic.parts", source.process_set
            )
            if dict(of_ranks)[source.root_rank]:  # Otherwise the root has all, for all.
                self._saved = Saved(self._saved.restored(), self._saved.arrays, alone=False)
        saved, names = copy.copy(self._saved), self._saved_state
        if source.takes_part:
            names = self._sync_structure(saved, source)
            saved.arrays = broadcast_arrays(saved.arrays, "elastic.arrays", source)
        saved.objects = self._from_source(saved.objects)
        saved.is_part = False
        self._saved, self._saved_state, self._is_synced = saved, names, True
        self.restore()

    def _sync_structure(self, saved: Saved, source: Source) -> dict[str, Any]:
        """Take from the root those attributes that have other leaves there, such as a longer list.

        All others keep what this rank has in the nodes of its trees, such as functions. Return the
        names of all attributes. Raises `ValueError` where arrays differ and no rank has a commit:
        none can have grown since.
        """
        told = allgather_object(
            (rank(), self._commit_number, saved.digests()), "elastic.structure", source.process_set
        )
        of_ranks = [digests for _, _, digests in told]
        names = {name for digests in of_ranks for name in digests}
        differing = {name for name in names if len({each.get(name) for each in of_ranks}) > 1}
        if not differing:
            return self._saved_state
        kinds = saved.kinds()
        if any(commit for _, commit, _ in told):
            kinds = {path: kind for path, kind in kinds.items() if kind == OPTIMIZER}
        check_same_tensors(kinds, "arrays", source)
        own = saved.tree()
        sent = self._from_source({name: own[name] for name in own if name in differing})
        kept = {name: tree for name, tree in own.items() if name not in differing}
        saved.adopt({**kept, **sent})
        saved.is_part = False  # The root has sent all.
        saved.enter_world()
        return dict.fromkeys({**kept, **sent})

    def _interrupt(self, kinds: int) -> None:
        """Let programs end: what they start after this would be started in the next world."""
        wait_for_all_programs()
        super()._interrupt(kinds)

    def _enter_world(self) -> None:
        """Forget compiled programs: they contain places and numbers of ranks.

        State that was divided among the ranks of the old world is divided anew, from the last save.
        """
        super()._enter_world()
        forget_programs()
        if self._saved.is_divided:
            self._saved.enter_world()
            self.restore()

    def _settle(self) -> None:
        super()._settle()
        self._is_synced = True

    def _tensors_to_compare(self) -> Iterator[Compared]:
        for name in self._saved_state:
            leaves, _ = jax.tree_util.tree_flatten_with_path(getattr(self, name), is_leaf=is_shard)
            for path, leaf in leaves:
                if is_array(leaf):
                    yield of_array(name + jax.tree_util.keystr(path), to_host(leaf))


__all__ = ["JaxState", "run"]
