"""hvdlite for numpy arrays: the collectives without a deep-learning framework.

    import hvdlite.numpy as hvd

    hvd.init()
    total = hvd.allreduce(local_sum, op=hvd.Sum)

Arrays may be of any numeric dtype, bool, complex, and ml_dtypes' bfloat16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdlite.common.api.forms import Forms
from hvdlite.common.api.runner import EngineRunner
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.plain.numpy_adapter import Array, NumpyAdapter
from hvdlite.common.runtime.basics import (
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
from hvdlite.common.runtime.lifecycle import add_process_set, init, remove_process_set, shutdown
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.missing_names import module_getattr
from hvdlite.numpy import checkpoint, elastic
from hvdlite.numpy.halos import halo

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


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

if TYPE_CHECKING:  # which would take every name for one that is there
    from hvdlite import data
else:
    __getattr__ = module_getattr(__name__, data="hvdlite.data")

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
    "checkpoint",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "data",
    "ddl_built",
    "elastic",
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
    "halo",
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
