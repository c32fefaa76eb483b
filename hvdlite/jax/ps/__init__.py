"""The parameter server for JAX: weights lie on servers, which make the steps.

import hvdlite.jax.ps as ps

ps.init()
optimizer = ps.DistributedOptimizer(optax.adam(1e-3), params)
params = optimizer.pull()
params = optimizer.step(gradients)
"""

from hvdlite.jax.ps.arrays import array_of, tensor_of
from hvdlite.jax.ps.optimizer import DistributedOptimizer
from hvdlite.ps import public
from hvdlite.ps.public import *  # noqa: F403

globals().update(public.calls_for(array_of, tensor_of))
__all__ = [*public.__all__, "DistributedOptimizer"]  # noqa: PLE0604 - they are strings
