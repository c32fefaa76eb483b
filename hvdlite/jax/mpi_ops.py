"""The collectives on arrays of JAX, and the basics of the job.

Collectives are computed at once, or are a part of what JAX traces.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hvdlite.common.api.call_checks import members_of
from hvdlite.common.api.differentiable import Verbs
from hvdlite.common.api.forms import Forms
from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.runner import CollectiveResult, EngineRunner, Shaping
from hvdlite.common.api.submit import Operation
from hvdlite.common.base.report_failure import reason_of_shutdown
from hvdlite.common.collectives.table import SPECS
from hvdlite.common.gradients.segment_plan import (
    set_comm_fusion,
    set_split_strategy_by_idx,
    set_split_strategy_by_size,
)
from hvdlite.common.runtime import lifecycle, public_names
from hvdlite.common.runtime.current import for_collective
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.runtime.public_names import *  # noqa: F403
from hvdlite.common.tensors.numpy_adapter import NumpyAdapter
from hvdlite.jax.calls import Call
from hvdlite.jax.order import wait_for_programs
from hvdlite.jax.programs import exchange, is_tracing

Function = Callable[[list[Any]], list[Any]]


def array_of(value: Any, collective: str = "a collective") -> np.ndarray[Any, Any]:
    """Return the values of an array on the host, without a copy where they are there.

    Raises `ValueError` for an array that is traced, and so has no values yet.
    """
    array = jnp.asarray(value)
    if isinstance(array, jax.core.Tracer):
        raise ValueError(
            f"{collective} needs values, and this array is traced (by jax.jit, jax.grad or "
            "jax.vmap): take the form that returns the result, such as hvd.allreduce(), which can "
            "be compiled"
        )
    return np.asarray(array)


class _Recording(threading.local):
    """The gradient of the collective that this thread is tracing; None where it has none."""

    adjoint: Function | None = None


class JaxRunner(EngineRunner[Any]):
    """Runs collectives on arrays of JAX, with their gradients."""

    def __init__(self) -> None:
        super().__init__(NumpyAdapter())
        self._recording = _Recording()

    def run(
        self, collective: str, tensors: Sequence[Any], name: str | None, options: CallOptions
    ) -> CollectiveResult:
        """Run one collective, now or when the program runs that is being traced."""
        if not is_tracing():
            result = super().run(collective, [*map(array_of, tensors)], name, options)
            return CollectiveResult([*map(jnp.asarray, result.tensors)], result.rows)
        if not tensors:
            return CollectiveResult([], [])
        back, self._recording.adjoint = self._recording.adjoint, None
        splits: list[Any] = [] if options.splits is None else [*options.splits]
        if splits and not any(isinstance(each, jax.core.Tracer) for each in splits):
            rows = [*map(int, splits)]
            if rows == rows[:1] * len(rows) and sum(rows) == tensors[0].shape[0]:
                options = options._replace(splits=None)  # As without any.
        (results,) = exchange([(Call(collective, options, name), tensors)], back)
        if not SPECS[collective].varying_rows:
            return CollectiveResult(results, [() for _ in results])
        # As many rows of each result came from each member.
        count = len(members_of(for_collective(), collective, options.process_set))
        return CollectiveResult(results, [[each.shape[0] // count] * count for each in results])

    def record(self, tensors: Sequence[Any], forward: Function, adjoint: Function) -> list[Any]:
        """Return ``forward(tensors)``, with the gradient that `adjoint` makes."""
        arrays = [*map(jnp.asarray, tensors)]
        if not is_tracing():
            return forward(arrays)
        self._recording.adjoint = adjoint
        try:
            return forward(arrays)
        finally:
            self._recording.adjoint = None

    def own_rows(self, tensor: Any, rows: Sequence[int], position: int) -> Any:
        """Return the part that came from the member at `position`."""
        start = sum(rows[:position])
        return tensor[start : start + rows[position]]

    def zeros_like(self, tensor: Any) -> Any:
        """Return zeros of the same shape and dtype."""
        return jnp.zeros_like(tensor)

    def row_count(self, tensor: Any) -> int:
        """Return the size of the first dimension; 0 where there is none."""
        return tensor.shape[0] if tensor.ndim else 0

    def padded(self, tensor: Any, rows: int) -> Any:
        """Return the tensor with rows of zeros behind it."""
        missing = jnp.zeros((rows - tensor.shape[0], *tensor.shape[1:]), tensor.dtype)
        return jnp.concatenate([tensor, missing])


class JaxForms(Forms[Any]):
    """The public functions for arrays of JAX."""

    def __init__(self, runner: JaxRunner) -> None:
        super().__init__(runner)
        self._verbs = Verbs(runner)

    def _start(
        self,
        collective: str,
        tensors: Sequence[Any],
        name: str | None,
        options: CallOptions,
        shape_result: Shaping[Any],
        in_place: bool = False,
    ) -> int:
        def shape(operation: Operation[Any], results: list[Any]) -> Any:
            return shape_result(operation, [*map(jnp.asarray, results)])

        arrays = [array_of(tensor, f"{collective}_async") for tensor in tensors]
        return super()._start(collective, arrays, name, options, shape, in_place)


def signal(collective: str, process_set: ProcessSet) -> Any:
    """Run a collective without a tensor in the program that is being traced; an int32 scalar."""
    ((result,),) = exchange([(Call(collective, CallOptions(process_set)), [])])
    return result


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
