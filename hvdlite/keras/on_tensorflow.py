"""The parts of a distributed Keras optimizer that know TensorFlow."""

from __future__ import annotations

from hvdlite.tf.errors import is_loss_in_tensorflow as is_loss
from hvdlite.tf.errors import unconverted as untraced
from hvdlite.tf.optimizer.aggregation import Accumulator
from hvdlite.tf.optimizer.gradient_exchange import Reducer
from hvdlite.tf.variables import compare_variables

__all__ = ["Accumulator", "Reducer", "compare_variables", "is_loss", "untraced"]
