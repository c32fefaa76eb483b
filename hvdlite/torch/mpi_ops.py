"""The collectives on torch tensors, and the basics of the job."""

from __future__ import annotations

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
from hvdlite.common.reduce_op import ReduceOp
from hvdlite.common.runtime import init, shutdown
from hvdlite.torch.adapter import TorchAdapter
from hvdlite.torch.autograd import TorchForms
from hvdlite.torch.dtypes import use_torch_casts
from hvdlite.torch.sparse import SparseForms

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

use_torch_casts()
forms = TorchForms(TorchAdapter())

allreduce = forms.allreduce
allreduce_async = forms.allreduce_async
allreduce_ = forms.allreduce_
allreduce_async_ = forms.allreduce_async_
grouped_allreduce = forms.grouped_allreduce
grouped_allreduce_async = forms.grouped_allreduce_async
grouped_allreduce_ = forms.grouped_allreduce_
grouped_allreduce_async_ = forms.grouped_allreduce_async_
sparse_allreduce_async = SparseForms(forms).sparse_allreduce_async
allgather = forms.allgather
allgather_async = forms.allgather_async
grouped_allgather = forms.grouped_allgather
grouped_allgather_async = forms.grouped_allgather_async
broadcast = forms.broadcast
broadcast_async = forms.broadcast_async
broadcast_ = forms.broadcast_
broadcast_async_ = forms.broadcast_async_
alltoall = forms.alltoall
alltoall_async = forms.alltoall_async
reducescatter = forms.reducescatter
reducescatter_async = forms.reducescatter_async
grouped_reducescatter = forms.grouped_reducescatter
grouped_reducescatter_async = forms.grouped_reducescatter_async
join = forms.join
barrier = forms.barrier
poll = forms.poll
synchronize = forms.synchronize
