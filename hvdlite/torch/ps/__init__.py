"""The parameter server for PyTorch: weights lie on servers, which make the steps.

import hvdlite.torch.ps as ps

ps.init()
optimizer = ps.DistributedOptimizer(optimizer, model.named_parameters(), mode="async")
"""

from hvdlite.ps import public
from hvdlite.ps.public import *  # noqa: F403
from hvdlite.ps.raw_calls import RawCalls
from hvdlite.torch.ps.arrays import matrix_of, shaped_tensor_of
from hvdlite.torch.ps.optimizer import DistributedOptimizer
from hvdlite.torch.ps.parameters import set_param_ps

_calls = RawCalls(matrix_of, shaped_tensor_of)
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

__all__ = [*public.__all__, *public.CALLS, "DistributedOptimizer", "set_param_ps"]  # noqa: PLE0604 - they are strings
