"""The parameter server for PyTorch: weights lie on servers, which make the steps.

import hvdlite.torch.ps as ps

ps.init()
optimizer = ps.DistributedOptimizer(optimizer, model.named_parameters(), mode="async")
"""

from hvdlite.ps.context import (
    barrier,
    init,
    leave,
    num_servers,
    rank,
    role,
    server_rank,
    shutdown,
    size,
)
from hvdlite.ps.shard import PsRolledBack
from hvdlite.torch.mpi_ops import Average, Sum
from hvdlite.torch.ps.optimizer import DistributedOptimizer, set_param_ps

__all__ = [
    "Average",
    "DistributedOptimizer",
    "PsRolledBack",
    "Sum",
    "barrier",
    "init",
    "leave",
    "num_servers",
    "rank",
    "role",
    "server_rank",
    "set_param_ps",
    "shutdown",
    "size",
]
