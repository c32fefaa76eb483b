"""The parameter server for Keras 3: weights lie on servers, which make the steps.

import hvdlite.keras.ps as ps

ps.init()
model.compile(optimizer=ps.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss=loss)
"""

import keras

from hvdlite.keras.ps.optimizer import DistributedOptimizer
from hvdlite.ps import public
from hvdlite.ps.public import *  # noqa: F403
from hvdlite.ps.raw_calls import RawCalls

_calls = RawCalls(keras.ops.convert_to_numpy, keras.ops.convert_to_tensor)
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
