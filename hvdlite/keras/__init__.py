"""hvdlite for Keras 3, with JAX, TensorFlow or PyTorch as backend, and for Keras 2.

import hvdlite.keras as hvd

hvd.init()
model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss=loss)
model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdlite.common.gradients.segment_plan import (
    set_comm_fusion,
    set_split_strategy_by_idx,
    set_split_strategy_by_size,
)
from hvdlite.common.iterations.live import metrics, progress
from hvdlite.common.iterations.trace import trace_iterations
from hvdlite.common.runtime import public_names
from hvdlite.common.runtime.public_names import *  # noqa: F403
from hvdlite.keras import callbacks, checkpoint, elastic
from hvdlite.keras.framework import adapter
from hvdlite.keras.mpi_ops import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
    shutdown,  # noqa: F401
)
from hvdlite.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model
from hvdlite.missing_names import attribute_error

if TYPE_CHECKING:
    from hvdlite import data
    from hvdlite.tf.compression import Compression


def __getattr__(name: str) -> Any:
    """Return `Compression` of the backend of Keras, or `hvdlite.data`; not imported before."""
    if name == "Compression":
        return adapter().Compression
    if name == "data":
        from hvdlite import data

        return data
    raise attribute_error(__name__, name)


__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "checkpoint",
    "data",
    "elastic",
    "load_model",
    "metrics",
    "progress",
    "reducescatter",
    "set_comm_fusion",
    "set_split_strategy_by_idx",
    "set_split_strategy_by_size",
    "trace_iterations",
]
__all__ += public_names.__all__
