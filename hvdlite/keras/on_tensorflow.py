"""The parts of a distributed Keras optimizer that know TensorFlow."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdlite.tf.aggregation import Accumulator
from hvdlite.tf.reducer import Reducer

__all__ = ["Accumulator", "Reducer", "untraced"]

untraced: Any = tf.autograph.experimental.do_not_convert
