"""Elastic training with numpy arrays: go on when ranks are lost, and let new ones join.

@hvd.elastic.run
def train(state):
    while state.step < steps:
        state.weights -= rate * hvd.allreduce(gradient(state.weights), name="gradient")
        state.step += 1
        state.commit()

train(hvd.elastic.NumpyState(weights=weights, step=0))
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite.common.api.objects import broadcast_object
from hvdlite.common.elastic.arrays import broadcast_arrays, copied
from hvdlite.common.elastic.run import run
from hvdlite.common.elastic.source import sync_source
from hvdlite.common.elastic.state import ObjectState, map_leaves, named_leaves
from hvdlite.common.runtime.basics import rank
from hvdlite.common.tensors.comparison import Compared, of_array


@dataclass(frozen=True)
class _Place:
    """The place of an array in a tree: its number among the saved arrays."""

    number: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class NumpyState(ObjectState):
    """The state of training with numpy: each keyword becomes an attribute that is tracked.

    Arrays, alone or in dicts, lists and tuples, are copied into memory that is kept, and get saved
    values back in place, so that all who hold them see these; an array of another shape or dtype is
    replaced. All other values are copied as in `ObjectState`. Raises as that does.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._arrays: list[np.ndarray[Any, Any]] = []
        super().__init__(broadcast_object, rank, **kwargs)

    def restore(self) -> None:
        """Go back to the last save."""
        for name, tree in self._saved_state.items():
            setattr(self, name, self._shown(getattr(self, name), tree))

    def sync(self) -> None:
        """Give all ranks what the root saved last: as their attributes, and as their last save.

        Where that rank is lost in between, the last save here stays what it was.
        """
        source = sync_source()
        saved, arrays = self._attributes_from_source(), self._arrays
        if source.takes_part:
            if rank() != source.root_rank:
                leaves = [leaf for _, leaf in named_leaves(saved, "state")]
                places = [leaf for leaf in leaves if isinstance(leaf, _Place)]
                arrays = [np.empty(place.shape, place.dtype) for place in places]
            arrays = broadcast_arrays(arrays, "elastic.arrays", source)
        self._saved_state, self._arrays = saved, arrays
        self.restore()

    def _copies(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the arrays into the kept ones, and return the rest with their places."""
        kept, self._arrays = iter(self._arrays), []

        def placed(leaf: Any) -> Any:
            if not _is_array(leaf):
                return leaf
            self._arrays.append(copied(leaf, next(kept, None)))
            return _Place(len(self._arrays) - 1, leaf.shape, leaf.dtype)

        return super()._copies(map_leaves(dict(values), placed))

    def _shown(self, current: Any, saved: Any) -> Any:
        """Return the saved tree, in the arrays and containers that there are where these fit."""
        if isinstance(saved, _Place):
            array = self._arrays[saved.number]
            is_room = _is_array(current) and current.flags.writeable
            return copied(array, current if is_room else None)
        if type(current) is type(saved) is dict and current.keys() == saved.keys():
            for key, value in saved.items():
                current[key] = self._shown(current[key], value)
            return current
        if type(current) is type(saved) is list and len(current) == len(saved):
            current[:] = map(self._shown, current, saved)
            return current
        return map_leaves(
            saved,
            lambda leaf: (
                self._shown(None, leaf) if isinstance(leaf, _Place) else copy.deepcopy(leaf)
            ),
        )

    def _tensors_to_compare(self) -> Iterator[Compared]:
        for name in self._saved_state:
            for path, leaf in named_leaves(getattr(self, name), name):
                if _is_array(leaf):
                    yield of_array(path, leaf)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and not value.dtype.hasobject


__all__ = ["NumpyState", "run"]
