"""hvdlite for TensorFlow.

import hvdlite.tf as hvd

hvd.init()
tape = hvd.DistributedGradientTape(tape)  # its gradients are those of all ranks
hvd.broadcast_variables(model.variables, root_rank=0)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdlite.missing_names import module_getattr, with_remedy

try:
    import tensorflow as tf
except ModuleNotFoundError as error:
    raise with_remedy(error, "tensorflow", "pip install 'hvdlite[tensorflow-cpu]'") from None

from hvdlite.common.iterations.live import metrics, progress
from hvdlite.common.iterations.trace import trace_iterations
from hvdlite.common.runtime.public_names import *  # noqa: F403
from hvdlite.tf import checkpoint, data, elastic, mpi_ops
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
from hvdlite.tf.mpi_ops import *  # noqa: F403
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

if TYPE_CHECKING:  # which would take every name for one that is there
    from hvdlite.tf.sync_batch_norm import SyncBatchNormalization
else:  # Keras is not imported before.
    __getattr__ = module_getattr(
        __name__, SyncBatchNormalization="hvdlite.tf.sync_batch_norm:SyncBatchNormalization"
    )

register_libraries()


def _check_has_gpu() -> bool:
    return bool(tf.config.list_physical_devices("GPU"))


__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "check_extension",
    "check_num_rank_power_of_2",
    "checkpoint",
    "data",
    "elastic",
    "gpu_available",
    "handle_average_backwards_compatibility",
    "metrics",
    "progress",
    "refs_to_vars",
    "split_list",
    "trace_iterations",
    "vars_to_refs",
]
__all__ += mpi_ops.__all__
