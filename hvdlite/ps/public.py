"""What the modules `ps` of all frameworks have in common, under the names that users import."""

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.ps.context import (
    barrier,
    init,
    leave,
    load,
    num_servers,
    rank,
    role,
    save,
    scale_servers,
    server_rank,
    shutdown,
    size,
)
from hvdlite.ps.worker.shard import PsRolledBack

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM

__all__ = [
    "Average",
    "PsRolledBack",
    "Sum",
    "barrier",
    "init",
    "leave",
    "load",
    "num_servers",
    "rank",
    "role",
    "save",
    "scale_servers",
    "server_rank",
    "shutdown",
    "size",
]
# The names of `RawCalls`, which each of these modules has for its own tensors.
CALLS = [
    "poll",
    "pull",
    "pull_async",
    "pull_rows",
    "pull_rows_async",
    "push",
    "push_async",
    "push_rows",
    "push_rows_async",
    "start",
    "start_rows",
    "synchronize",
]
