"""The parameter server for TensorFlow: weights lie on servers, which make the steps.

import hvdlite.tf.ps as ps

ps.init()
optimizer = ps.DistributedOptimizer(keras.optimizers.SGD(0.1))
optimizer.build(model.trainable_variables)
"""

import numpy as np
import tensorflow as tf

from hvdlite.keras.ps.optimizer import DistributedOptimizer
from hvdlite.ps import public
from hvdlite.ps.public import *  # noqa: F403
from hvdlite.ps.raw_calls import RawCalls

_calls = RawCalls(np.asarray, tf.convert_to_tensor)
poll = _calls.poll
pull = _calls.pull
pull_async = _calls.pull_async
pull_rows = _calls.pull_rows
pull_rows_async = _calls.pull_rows_async
push = _calls.push
push_async = _calls.push_async
push_rows = _calls.push_rows
push_rows_async = _calls.push_rows_async
start = _calls.start
start_rows = _calls.start_rows
synchronize = _calls.synchronize

__all__ = [*public.__all__, *public.CALLS, "DistributedOptimizer"]  # noqa: PLE0604 - they are strings
