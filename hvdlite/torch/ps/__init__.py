"""The parameter server for PyTorch: weights lie on servers, which make the steps.

import hvdlite.torch.ps as ps

ps.init()
optimizer = ps.DistributedOptimizer(optimizer, model.named_parameters(), mode="async")
"""

from hvdlite.ps import public
from hvdlite.ps.public import *  # noqa: F403
from hvdlite.torch.ps.arrays import matrix_of, shaped_tensor_of
from hvdlite.torch.ps.optimizer import DistributedOptimizer
from hvdlite.torch.ps.parameters import set_param_ps

globals().update(public.calls_for(matrix_of, shaped_tensor_of))
__all__ = [*public.__all__, "DistributedOptimizer", "set_param_ps"]  # noqa: PLE0604 - they are strings
