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
    from hvdlite.common.iterations.live import metrics, progress
    from hvdlite.common.iterations.trace import trace_iterations
    from hvdlite.common.runtime.public_names import *  # noqa: F403
    from hvdlite.torch import mpi_ops
    from hvdlite.torch.accelerators import register_libraries
    from hvdlite.torch.compression import Compression
    from hvdlite.torch.functions import (
        allgather_object,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
    )
    from hvdlite.torch.mpi_ops import *  # noqa: F403
    from hvdlite.torch.optimizer import DistributedOptimizer
    from hvdlite.torch.process_group.registration import init_process_group, register
    from hvdlite.torch.spatial import SpatialConv2d
    from hvdlite.torch.sync_batch_norm import SyncBatchNorm


register()
register_libraries()


def _check_has_gpu() -> bool:
    return torch.cuda.is_available()


if TYPE_CHECKING:  # which would take every name for one that is there
    from hvdlite import data
    from hvdlite.torch import checkpoint, elastic
else:
    __getattr__ = module_getattr(
        __name__, data="hvdlite.data", checkpoint="hvdlite.torch.checkpoint",
        elastic="hvdlite.torch.elastic",
    )  # fmt: skip

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "SpatialConv2d",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "checkpoint",
    "data",
    "elastic",
    "init_process_group",
    "metrics",
    "progress",
    "trace_iterations",
]
__all__ += mpi_ops.__all__
__all__.remove("is_homogeneous")
