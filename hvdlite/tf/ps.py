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

globals().update(public.calls_for(np.asarray, tf.convert_to_tensor))
__all__ = [*public.__all__, "DistributedOptimizer"]  # noqa: PLE0604 - they are strings
