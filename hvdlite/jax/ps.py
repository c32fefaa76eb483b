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
from hvdlite.ps.raw_calls import RawCalls

_calls = RawCalls(np.asarray, jnp.asarray)
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

__all__ = [*public.__all__, *public.CALLS]  # noqa: PLE0604 - they are strings
