"""hvdlite for JAX.

import hvdlite.jax as hvd

hvd.init()
optimizer = hvd.DistributedOptimizer(optax.adam(1e-3))  # its gradients are those of all ranks
params = hvd.broadcast_parameters(params, root_rank=0)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdlite.missing_names import module_getattr, with_remedy

try:
    import jax  # noqa: F401
    import optax  # noqa: F401
except ModuleNotFoundError as error:
    raise with_remedy(error, error.name or "jax", "pip install 'hvdlite[jax]'") from None

from hvdlite.common.iterations.live import metrics, progress
from hvdlite.common.iterations.trace import trace_iterations
from hvdlite.common.runtime.public_names import *  # noqa: F403
from hvdlite.jax import checkpoint, elastic, mpi_ops
from hvdlite.jax.compression import Compression
from hvdlite.jax.functions import allgather_object, broadcast_object, broadcast_parameters
from hvdlite.jax.mpi_ops import *  # noqa: F403
from hvdlite.jax.optimizer import DistributedOptimizer, grad, value_and_grad

if TYPE_CHECKING:  # which would take every name for one that is there
    from hvdlite import data
else:
    __getattr__ = module_getattr(__name__, data="hvdlite.data")

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "allgather_object",
    "broadcast_object",
    "broadcast_parameters",
    "checkpoint",
    "data",
    "elastic",
    "grad",
    "metrics",
    "progress",
    "trace_iterations",
    "value_and_grad",
]
__all__ += mpi_ops.__all__
