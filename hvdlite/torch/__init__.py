"""hvdlite for PyTorch.

import hvdlite.torch as hvd

hvd.init()
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdlite.common.base.gc_pause import without_collecting
from hvdlite.missing_names import module_getattr, with_remedy

try:
    import torch
except ModuleNotFoundError as error:
    raise with_remedy(error, "torch", "pip install 'hvdlite[torch]'") from None

with without_collecting():
    from hvdlite.common.base.errors import HorovodInternalError
    from hvdlite.common.iterations.trace import trace_iterations
    from hvdlite.common.runtime.lifecycle import add_process_set, remove_process_set
    from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
    from hvdlite.torch import checkpoint, elastic
    from hvdlite.torch.accelerators import register_libraries
    from hvdlite.torch.compression import Compression
    from hvdlite.torch.functions import (
        allgather_object,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
    )
    from hvdlite.torch.halos import halo
    from hvdlite.torch.mpi_ops import (
        Adasum,
        Average,
        Max,
        Min,
        Product,
        Sum,
        allgather,
        allgather_async,
        allreduce,
        allreduce_,
        allreduce_async,
        allreduce_async_,
        alltoall,
        alltoall_async,
        barrier,
        broadcast,
        broadcast_,
        broadcast_async,
        broadcast_async_,
        ccl_built,
        cross_rank,
        cross_size,
        cuda_built,
        ddl_built,
        gloo_built,
        gloo_enabled,
        grouped_allgather,
        grouped_allgather_async,
        grouped_allreduce,
        grouped_allreduce_,
        grouped_allreduce_async,
        grouped_allreduce_async_,
        grouped_reducescatter,
        grouped_reducescatter_async,
        init,
        is_initialized,
        join,
        local_rank,
        local_size,
        mpi_built,
        mpi_enabled,
        mpi_threads_supported,
        nccl_built,
        poll,
        rank,
        reducescatter,
        reducescatter_async,
        rocm_built,
        set_comm_fusion,
        set_split_strategy_by_idx,
        set_split_strategy_by_size,
        shutdown,
        size,
        sparse_allreduce_async,
        start_timeline,
        stop_timeline,
        synchronize,
    )
    from hvdlite.torch.optimizer import DistributedOptimizer
    from hvdlite.torch.process_group.registration import init_process_group, register
    from hvdlite.torch.spatial import SpatialConv2d
    from hvdlite.torch.sync_batch_norm import SyncBatchNorm


register()
register_libraries()


def _check_has_gpu() -> bool:
    """Return whether torch sees a GPU."""
    return torch.cuda.is_available()


if TYPE_CHECKING:  # which would take every name for one that is there
    from hvdlite import data
else:
    __getattr__ = module_getattr(__name__, data="hvdlite.data")

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "SpatialConv2d",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
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
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
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
    "init_process_group",
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
    "set_comm_fusion",
    "set_split_strategy_by_idx",
    "set_split_strategy_by_size",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "trace_iterations",
]
