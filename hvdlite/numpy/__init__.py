"""hvdlite for numpy arrays: the collectives without a deep-learning framework.

    import hvdlite.numpy as hvd

    hvd.init()
    total = hvd.allreduce(local_sum, op=hvd.Sum)

Arrays may be of any numeric dtype, bool, complex, and ml_dtypes' bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdlite.common.api.forms import Forms
from hvdlite.common.api.halo import Arrays
from hvdlite.common.api.runner import EngineRunner
from hvdlite.common.iterations.live import metrics, progress
from hvdlite.common.runtime import public_names
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.runtime.public_names import *  # noqa: F403
from hvdlite.common.tensors.numpy_adapter import Array, NumpyAdapter
from hvdlite.missing_names import module_getattr
from hvdlite.numpy import checkpoint, elastic

_forms: Forms[Array] = Forms(EngineRunner(NumpyAdapter()))

allreduce = _forms.allreduce
allreduce_async = _forms.allreduce_async
allreduce_ = _forms.allreduce_
allreduce_async_ = _forms.allreduce_async_
grouped_allreduce = _forms.grouped_allreduce
grouped_allreduce_async = _forms.grouped_allreduce_async
grouped_allreduce_ = _forms.grouped_allreduce_
grouped_allreduce_async_ = _forms.grouped_allreduce_async_
allgather = _forms.allgather
allgather_async = _forms.allgather_async
grouped_allgather = _forms.grouped_allgather
grouped_allgather_async = _forms.grouped_allgather_async
broadcast = _forms.broadcast
broadcast_async = _forms.broadcast_async
broadcast_ = _forms.broadcast_
broadcast_async_ = _forms.broadcast_async_
alltoall = _forms.alltoall
alltoall_async = _forms.alltoall_async
reducescatter = _forms.reducescatter
reducescatter_async = _forms.reducescatter_async
grouped_reducescatter = _forms.grouped_reducescatter
grouped_reducescatter_async = _forms.grouped_reducescatter_async
join = _forms.join
barrier = _forms.barrier
poll = _forms.poll
synchronize = _forms.synchronize


class _NumpyArrays(Arrays[Array]):
    def shape(self, array: Array) -> Sequence[int]:
        return array.shape

    def move(self, array: Array, dim: int, to: int) -> Array:
        return np.moveaxis(array, dim, to)

    def concatenate(self, arrays: Sequence[Array], dim: int) -> Array:
        return np.concatenate(arrays, dim)

    def border(self, array: Array, dim: int, width: int, value: float) -> Array:
        return np.full((*array.shape[:dim], width, *array.shape[dim + 1 :]), value, array.dtype)

    def exchange(
        self, rows: Array, splits: list[int], name: str | None, process_set: ProcessSet
    ) -> tuple[Array, Any]:
        output, received = _forms.alltoall(rows, splits, name, process_set)
        return output, received


halo = _NumpyArrays().halo


if TYPE_CHECKING:  # which would take every name for one that is there
    from hvdlite import data
else:
    __getattr__ = module_getattr(__name__, data="hvdlite.data")

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "checkpoint",
    "data",
    "elastic",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "halo",
    "join",
    "metrics",
    "poll",
    "progress",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]
__all__ += public_names.__all__
