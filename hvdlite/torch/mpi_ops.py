"""The collectives on torch tensors, and the questions about the job: rank, size and others."""

from __future__ import annotations

from hvdlite.common.api.forms import Forms
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.segment_plan import (
    set_comm_fusion,
    set_split_strategy_by_idx,
    set_split_strategy_by_size,
)
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
from hvdlite.common.runtime.lifecycle import init, shutdown
from hvdlite.torch.adapter import TorchAdapter
from hvdlite.torch.autograd import TorchRunner, untraced
from hvdlite.torch.dtypes import use_torch_casts
from hvdlite.torch.sparse import SparseForms

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

use_torch_casts()
runner = TorchRunner(TorchAdapter())
forms = Forms(runner)

allreduce = untraced(forms.allreduce)
allreduce_async = untraced(forms.allreduce_async)
allreduce_ = untraced(forms.allreduce_)
allreduce_async_ = untraced(forms.allreduce_async_)
grouped_allreduce = untraced(forms.grouped_allreduce)
grouped_allreduce_async = untraced(forms.grouped_allreduce_async)
grouped_allreduce_ = untraced(forms.grouped_allreduce_)
grouped_allreduce_async_ = untraced(forms.grouped_allreduce_async_)
sparse_allreduce_async = untraced(SparseForms(runner).sparse_allreduce_async)
allgather = untraced(forms.allgather)
allgather_async = untraced(forms.allgather_async)
grouped_allgather = untraced(forms.grouped_allgather)
grouped_allgather_async = untraced(forms.grouped_allgather_async)
broadcast = untraced(forms.broadcast)
broadcast_async = untraced(forms.broadcast_async)
broadcast_ = untraced(forms.broadcast_)
broadcast_async_ = untraced(forms.broadcast_async_)
alltoall = untraced(forms.alltoall)
alltoall_async = untraced(forms.alltoall_async)
reducescatter = untraced(forms.reducescatter)
reducescatter_async = untraced(forms.reducescatter_async)
grouped_reducescatter = untraced(forms.grouped_reducescatter)
grouped_reducescatter_async = untraced(forms.grouped_reducescatter_async)
join = untraced(forms.join)
barrier = untraced(forms.barrier)
poll = untraced(forms.poll)
synchronize = untraced(forms.synchronize)

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
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
]
