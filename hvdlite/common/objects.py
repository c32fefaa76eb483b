"""Python objects from rank to rank, as cloudpickle's bytes in tensors of any framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from hvdlite.common.forms import Forms
from hvdlite.common.process_sets import ProcessSet, global_process_set
from hvdlite.common.runtime import for_collective

T = TypeVar("T")
Array = NDArray[Any]


class Objects(Generic[T]):
    """Built on the collectives of one framework.

    `wrap` makes a tensor of a flat array of uint8 or int64, `unwrap` the opposite.
    """

    def __init__(
        self, forms: Forms[T], wrap: Callable[[Array], T], unwrap: Callable[[T], Array]
    ) -> None:
        self._forms = forms
        self._wrap = wrap
        self._unwrap = unwrap

    def broadcast_object(
        self,
        obj: Any,
        root_rank: int = 0,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """The object of the global rank `root_rank`, on every rank; blocks.

        `obj` is anything that cloudpickle can pickle, and has no effect on other ranks than the
        root, which gets its own object back. Raises `ValueError` for a foreign root.
        """
        name = name or "broadcast_object"
        is_root = for_collective().rank == root_rank
        body = _pickle(obj) if is_root else np.empty(0, np.uint8)
        size = self._wrap(np.array([body.size], np.int64))
        size = self._forms.broadcast(size, root_rank, f"{name}.sz", process_set)
        if not is_root:
            body = np.empty(int(self._unwrap(size)[0]), np.uint8)
        sent = self._forms.broadcast(self._wrap(body), root_rank, f"{name}.t", process_set)
        return obj if is_root else _unpickle(self._unwrap(sent))

    def allgather_object(
        self,
        obj: Any,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> list[Any]:
        """The objects of all ranks, in rank order; blocks. A joined rank has none.

        `obj` is anything that cloudpickle can pickle.
        """
        name = name or "allgather_object"
        body = _pickle(obj)
        size = self._wrap(np.array([body.size], np.int64))
        sizes = self._unwrap(self._forms.allgather(size, f"{name}.sz", process_set))
        bodies = self._unwrap(self._forms.allgather(self._wrap(body), f"{name}.t", process_set))
        ends = np.cumsum(sizes).tolist()
        starts = [0, *ends[:-1]]
        return [_unpickle(bodies[start:end]) for start, end in zip(starts, ends, strict=True)]


def _pickle(obj: Any) -> Array:
    return np.frombuffer(bytearray(cloudpickle.dumps(obj)), np.uint8)


def _unpickle(body: Array) -> Any:
    return cloudpickle.loads(body)
