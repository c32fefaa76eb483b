"""Python objects that are sent between ranks, pickled by cloudpickle, in every framework."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np

from hvdlite.common.api.forms import Forms
from hvdlite.common.api.runner import EngineRunner
from hvdlite.common.runtime.current import for_collective
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.tensors.numpy_adapter import Array, NumpyAdapter

array_forms: Forms[Array] = Forms(EngineRunner(NumpyAdapter()))  # Of what hvdlite itself sends.


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of the global rank `root_rank` on every rank; blocks.

    `obj` is anything that cloudpickle can pickle, and has no effect on other ranks than the
    root, which gets its own object back. Raises `ValueError` for a foreign root.
    """
    name = name or "broadcast_object"
    is_root = for_collective().rank == root_rank
    body = _pickle(obj) if is_root else np.empty(0, np.uint8)
    length = np.array([body.size], np.int64)
    size = array_forms.broadcast(length, root_rank, f"{name}.sz", process_set)
    if not is_root:
        body = np.empty(int(size[0]), np.uint8)
    sent = array_forms.broadcast(body, root_rank, f"{name}.t", process_set)
    return obj if is_root else _unpickle(sent)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order; blocks. A joined rank has none.

    `obj` is anything that cloudpickle can pickle.
    """
    name = name or "allgather_object"
    body = _pickle(obj)
    size = np.array([body.size], np.int64)
    sizes = array_forms.allgather(size, f"{name}.sz", process_set)
    bodies = array_forms.allgather(body, f"{name}.t", process_set)
    ends = np.cumsum(sizes).tolist()
    starts = [0, *ends[:-1]]
    return [_unpickle(bodies[start:end]) for start, end in zip(starts, ends, strict=True)]


class GatherByRank:
    """Exchanges objects between the ranks of a set; the exchanges are named after the label."""

    def __init__(self, label: str, process_set: ProcessSet = global_process_set) -> None:
        self._label, self._process_set = label, process_set

    def __call__(self, name: str, obj: Any) -> dict[int, Any]:
        """Return the objects of all ranks by their global ranks; blocks. A joined rank has none."""
        mine = (for_collective().rank, obj)
        return dict(allgather_object(mine, f"{self._label}.{name}", self._process_set))

    def are_equal(self, name: str, body: bytes) -> bool:
        """Return whether all ranks that have not joined give the same bytes, and as many; blocks.

        This is one exchange, without pickles.
        """
        mine = np.frombuffer(body, np.uint8).reshape(1, -1)
        rows = array_forms.allgather(mine, f"{self._label}.{name}", self._process_set)
        return bool((rows == mine).all())


def _pickle(obj: Any) -> Array:
    return np.frombuffer(bytearray(cloudpickle.dumps(obj)), np.uint8)


def _unpickle(body: Array) -> Any:
    return cloudpickle.loads(body)
