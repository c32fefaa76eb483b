"""hvdlite for numpy arrays: the collectives without a deep-learning framework.

    import hvdlite.numpy as hvd

    hvd.init()
    total = hvd.allreduce(local_sum, op=hvd.Sum)

Arrays may be of any numeric dtype, bool, complex, and ml_dtypes' bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.adapter import HOST_DEVICE, CpuBuffer, HostBuffer, TensorSpec
from hvdlite.common.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    size,
    start_timeline,
    stop_timeline,
)
from hvdlite.common.errors import HorovodInternalError
from hvdlite.common.forms import Forms
from hvdlite.common.operations import read_splits
from hvdlite.common.process_sets import ProcessSet, global_process_set
from hvdlite.common.reduce_op import ReduceOp
from hvdlite.common.runtime import add_process_set, init, remove_process_set, shutdown

Array = NDArray[Any]

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


class _CopiedBuffer(CpuBuffer):
    """The output for an array that is not contiguous."""

    __slots__ = ("_target",)

    def __init__(self, target: Array) -> None:
        super().__init__(np.empty(target.size, target.dtype))
        self._target = target

    def commit(self) -> None:
        self._target[...] = self.array.reshape(self._target.shape)


class NumpyAdapter:
    """numpy arrays, and whatever ``numpy.asarray`` makes one of."""

    def spec(self, tensor: Array) -> TensorSpec:
        """dtype, shape and device; a number or a list is an array too."""
        array = np.asarray(tensor)
        if not array.dtype.isnative:
            raise ValueError(
                f"Tensor type {array.dtype.str} is not supported: its bytes are in the order of "
                "another machine; convert it with astype(dtype.newbyteorder('='))"
            )
        return TensorSpec(array.dtype.name, array.shape, HOST_DEVICE)

    def input(self, tensor: Array) -> HostBuffer:
        """The array's own memory, or a copy of one that is not contiguous."""
        return CpuBuffer(np.ascontiguousarray(tensor).reshape(-1))

    def empty_like(self, tensor: Array, shape: tuple[int, ...]) -> Array:
        """A new array."""
        return np.empty(shape, np.asarray(tensor).dtype)

    def output(self, tensor: Array) -> HostBuffer:
        """The array's own memory, or a buffer that is copied into one that is not contiguous."""
        if not isinstance(tensor, np.ndarray) or not tensor.flags.writeable:
            what = "a read-only one" if isinstance(tensor, np.ndarray) else str(type(tensor))
            raise ValueError(f"only a numpy array can be written in place, not {what}")
        return CpuBuffer(tensor.reshape(-1)) if tensor.flags.c_contiguous else _CopiedBuffer(tensor)

    def read_splits(self, splits: Any) -> list[int]:
        """Splits from a list or an array."""
        return read_splits(np.asarray(splits))

    def make_splits(self, splits: Sequence[int], like: Any) -> Array:
        """An array of the splits' dtype, int32 where none were given as an array."""
        return np.array(splits, like.dtype if isinstance(like, np.ndarray) else np.int32)

    def finish(self, tensor: Array) -> None:
        """Host memory needs no ordering."""


_forms: Forms[Array] = Forms(NumpyAdapter())

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

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
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
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
