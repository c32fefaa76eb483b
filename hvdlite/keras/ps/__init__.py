"""The parameter server for Keras 3: weights lie on servers, which make the steps.

import hvdlite.keras.ps as ps

ps.init()
model.compile(optimizer=ps.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss=loss)
"""

import keras

from hvdlite.keras.ps.optimizer import DistributedOptimizer
from hvdlite.keras.ps.programs import after_programs
from hvdlite.ps import public
from hvdlite.ps.public import *  # noqa: F403

for _name in ("barrier", "leave", "load", "save", "scale_servers", "shutdown"):
    globals()[_name] = after_programs(getattr(public, _name))
globals().update(public.calls_for(keras.ops.convert_to_numpy, keras.ops.convert_to_tensor))
__all__ = [*public.__all__, "DistributedOptimizer"]  # noqa: PLE0604 - they are strings
