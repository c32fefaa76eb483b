"""The collectives on arrays of JAX, computed at once or as a part of what JAX traces."""

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
from hvdlite.common.collectives.table import SPECS
from hvdlite.common.runtime.current import for_collective
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.tensors.numpy_adapter import NumpyAdapter
from hvdlite.jax.calls import Call
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
        if options.splits is not None and len({*options.splits}) == 1:  # As without any.
            parts = len(options.splits) * int(options.splits[0])
            options = options._replace(splits=None) if parts == tensors[0].shape[0] else options
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
