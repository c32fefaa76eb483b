"""The parameter server for arrays of JAX: servers keep tensors, to which pushes are added.

import hvdlite.jax.ps as ps

ps.init()
ps.push("counts", counts)
total = ps.pull("counts")
"""

import jax.numpy as jnp
import numpy as np

from hvdlite.ps import public
from hvdlite.ps.public import *  # noqa: F403

globals().update(public.calls_for(np.asarray, jnp.asarray))
__all__ = [*public.__all__]  # noqa: PLE0604 - they are strings
