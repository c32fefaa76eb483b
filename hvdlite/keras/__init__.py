"""hvdlite for Keras 3, with TensorFlow or PyTorch as backend, and for Keras 2.

import hvdlite.keras as hvd

hvd.init()
model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss=loss)
model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.segment_plan import (
    set_comm_fusion,
    set_split_strategy_by_idx,
    set_split_strategy_by_size,
)
from hvdlite.common.iterations.trace import trace_iterations
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
from hvdlite.keras import callbacks, checkpoint, elastic
from hvdlite.keras.framework import adapter
from hvdlite.keras.models import load_model
from hvdlite.keras.mpi_ops import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)
from hvdlite.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from hvdlite.missing_names import attribute_error

if TYPE_CHECKING:
    from hvdlite import data
    from hvdlite.tf.compression import Compression

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def __getattr__(name: str) -> Any:
    """Return `Compression` of the backend of Keras, or `hvdlite.data`; not imported before."""
    if name == "Compression":
        return adapter().Compression
    if name == "data":
        from hvdlite import data

        return data
    raise attribute_error(__name__, name)


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
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
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "set_comm_fusion",
    "set_split_strategy_by_idx",
    "set_split_strategy_by_size",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "trace_iterations",
]
