"""hvdlite for TensorFlow.

import hvdlite.tf as hvd

hvd.init()
tape = hvd.DistributedGradientTape(tape)  # its gradients are those of all ranks
hvd.broadcast_variables(model.variables, root_rank=0)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hvdlite.missing_names import attribute_error, with_remedy

try:
    import tensorflow as tf
except ModuleNotFoundError as error:
    raise with_remedy(error, "tensorflow", "pip install 'hvdlite[tensorflow-cpu]'") from None

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.iterations.trace import trace_iterations
from hvdlite.common.runtime.lifecycle import add_process_set, remove_process_set
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.tf import checkpoint, data, elastic
from hvdlite.tf.accelerators import register_libraries
from hvdlite.tf.compression import Compression
from hvdlite.tf.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from hvdlite.tf.gradient_tape import DistributedGradientTape, PartialDistributedGradientTape
from hvdlite.tf.halos import halo
from hvdlite.tf.mpi_ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    reducescatter,
    rocm_built,
    set_comm_fusion,
    set_split_strategy_by_idx,
    set_split_strategy_by_size,
    shutdown,
    size,
    size_op,
    start_timeline,
    stop_timeline,
)
from hvdlite.tf.optimizer import DistributedOptimizer
from hvdlite.tf.util import (
    check_extension,
    check_num_rank_power_of_2,
    gpu_available,
    handle_average_backwards_compatibility,
    refs_to_vars,
    split_list,
    vars_to_refs,
)

if TYPE_CHECKING:
    from hvdlite.tf.sync_batch_norm import SyncBatchNormalization

register_libraries()


def __getattr__(name: str) -> Any:
    """`SyncBatchNormalization` is made when it is asked for: Keras is not imported before."""
    if name == "SyncBatchNormalization":
        return import_module("hvdlite.tf.sync_batch_norm").SyncBatchNormalization
    raise attribute_error(__name__, name)


def _check_has_gpu() -> bool:
    """Whether TensorFlow sees a GPU."""
    return bool(tf.config.list_physical_devices("GPU"))


__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "check_extension",
    "check_num_rank_power_of_2",
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
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "halo",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "refs_to_vars",
    "remove_process_set",
    "rocm_built",
    "set_comm_fusion",
    "set_split_strategy_by_idx",
    "set_split_strategy_by_size",
    "shutdown",
    "size",
    "size_op",
    "split_list",
    "start_timeline",
    "stop_timeline",
    "trace_iterations",
    "vars_to_refs",
]
