"""What the modules `ps` of all frameworks have in common, under the names that users import.

The calls here are for arrays of numpy; `calls_for` has them for the tensors of another framework.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

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
from hvdlite.ps.layouts.blocks import Array
from hvdlite.ps.raw_calls import RawCalls
from hvdlite.ps.worker.shard import PsRolledBack

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM

_calls = RawCalls(np.asarray, lambda array: array)
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


def calls_for(array: Callable[[Any], Array], tensor: Callable[[Array], Any]) -> dict[str, Any]:
    """Return the calls above by name, for tensors of which `array` and `tensor` know: `RawCalls`.

    A module with all names of this one replaces those of the calls by them.
    """
    calls = RawCalls(array, tensor)
    return {name: getattr(calls, name) for name in vars(RawCalls) if not name.startswith("_")}


__all__ = [
    "Average",
    "PsRolledBack",
    "Sum",
    "barrier",
    "init",
    "leave",
    "load",
    "num_servers",
    "poll",
    "pull",
    "pull_async",
    "pull_rows",
    "pull_rows_async",
    "push",
    "push_async",
    "push_rows",
    "push_rows_async",
    "rank",
    "role",
    "save",
    "scale_servers",
    "server_rank",
    "shutdown",
    "size",
    "start",
    "start_rows",
    "synchronize",
]
