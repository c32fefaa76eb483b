"""The collectives on arrays of JAX, and the basics of the job."""

from __future__ import annotations

from typing import Any

from hvdlite.common.base.report_failure import reason_of_shutdown
from hvdlite.common.gradients.segment_plan import (
    set_comm_fusion,
    set_split_strategy_by_idx,
    set_split_strategy_by_size,
)
from hvdlite.common.runtime import lifecycle, public_names
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.runtime.public_names import *  # noqa: F403
from hvdlite.jax.order import wait_for_programs
from hvdlite.jax.programs import is_tracing
from hvdlite.jax.runner import JaxForms, JaxRunner, signal

_forms = JaxForms(JaxRunner())

allreduce = _forms.allreduce
allreduce_async = _forms.allreduce_async
grouped_allreduce = _forms.grouped_allreduce
grouped_allreduce_async = _forms.grouped_allreduce_async
allgather = _forms.allgather
allgather_async = _forms.allgather_async
grouped_allgather = _forms.grouped_allgather
grouped_allgather_async = _forms.grouped_allgather_async
broadcast = _forms.broadcast
broadcast_async = _forms.broadcast_async
alltoall = _forms.alltoall
alltoall_async = _forms.alltoall_async
reducescatter = _forms.reducescatter
reducescatter_async = _forms.reducescatter_async
grouped_reducescatter = _forms.grouped_reducescatter
grouped_reducescatter_async = _forms.grouped_reducescatter_async
poll = _forms.poll
synchronize = _forms.synchronize


def join(process_set: ProcessSet = global_process_set) -> Any:
    """Say that this rank has no more data, and wait until all ranks of the set say so.

    Until then the others' collectives go on without this rank: it counts for nothing in a
    reduction (an Average still divides by the size of the set) and gives no rows. Returns the
    global rank that joined last, the same on all ranks: an int, or an int32 scalar in a program.
    Programs that this thread has started end before.
    """
    if is_tracing():
        return signal("join", process_set)
    wait_for_programs()
    return _forms.join(process_set=process_set)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the set have called this; in a program, each time that it runs.

    Programs that this thread has started end before.
    """
    if is_tracing():
        signal("barrier", process_set)
    else:
        wait_for_programs()
        _forms.barrier(process_set)


def shutdown() -> None:  # type: ignore[no-redef]
    """Depart from the job, after the programs that this thread has started.

    Pending collectives fail; `init` may be called again afterwards. Other ranks may go on among
    themselves: collectives that need this rank fail and name it, and the exception that is being
    handled here, if there is one.
    """
    if not reason_of_shutdown():
        wait_for_programs()
    lifecycle.shutdown()


__all__ = [
    "allgather", "allgather_async", "allreduce", "allreduce_async", "alltoall", "alltoall_async",
    "barrier", "broadcast", "broadcast_async", "grouped_allgather", "grouped_allgather_async",
    "grouped_allreduce", "grouped_allreduce_async", "grouped_reducescatter",
    "grouped_reducescatter_async", "join", "poll", "reducescatter", "reducescatter_async",
    "set_comm_fusion", "set_split_strategy_by_idx", "set_split_strategy_by_size", "synchronize",
]  # fmt: skip
__all__ += public_names.__all__
