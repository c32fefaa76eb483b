"""Checkpoints of variables of TensorFlow and of models of Keras.

state = {"model": model, "optimizer": optimizer, "weights": [variable], "step": 100}
hvd.checkpoint.save("checkpoint", state)
step = hvd.checkpoint.load("checkpoint", state)["step"]  # with any number of ranks

Inference is data parallel here, or whole: a variable that is cut has one for its part on each rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite.checkpoint import public
from hvdlite.checkpoint.public import *  # noqa: F403
from hvdlite.checkpoint.public import CheckpointForms
from hvdlite.checkpoint.tensors import Array, VariableTensors


class TensorFlowTensors(VariableTensors):
    """Variables and tensors of TensorFlow beside those of Keras, and arrays."""

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, (tf.Variable, tf.Tensor)) or super().is_tensor(value)

    def array(self, tensor: Any) -> Array:
        """Return the values on the host. Raises `ValueError` while a graph is built."""
        if isinstance(tensor, (tf.Variable, tf.Tensor)):
            if not tf.executing_eagerly():
                raise ValueError("checkpoints read values: call them outside of a tf.function")
            return np.asarray(tensor.numpy())
        return super().array(tensor)

    def store(self, tensor: Any, values: Array) -> Any:
        """Assign values to a variable; return a new tensor instead of a tensor."""
        if isinstance(tensor, tf.Tensor):
            return tf.constant(values)
        return super().store(tensor, values)


globals().update(public.functions_of(CheckpointForms(TensorFlowTensors())))
__all__ = [*public.__all__]  # noqa: PLE0604 - they are strings
