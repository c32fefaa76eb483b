"""How the public forms start calls, blocking and not, in place and not, and take results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from hvdlite.common.api.differentiable import Verbs
from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.repeated_call import RepeatedCall
from hvdlite.common.api.runner import EngineRunner, Shaping
from hvdlite.common.api.submit import Operation, start
from hvdlite.common.runtime.state import find, for_collective

T = TypeVar("T")
Tensors = Sequence[T]


def only(operation: Operation[Any], results: list[Any]) -> Any:
    """Return the result of a call with one tensor."""
    return results[0]


def as_tuple(operation: Operation[Any], results: list[Any]) -> Any:
    """Return the results as a tuple."""
    return tuple(results)


class StartingForms(Generic[T]):
    """How the forms start calls of one framework's tensors, which `runner` runs, and end them."""

    def __init__(self, runner: EngineRunner[T]) -> None:
        self._runner = runner
        self._verbs = Verbs(runner)

    def _start(
        self,
        collective: str,
        tensors: Tensors[T],
        name: str | None,
        options: CallOptions,
        shape_result: Shaping[T],
        in_place: bool = False,
    ) -> int:
        """Start, and return the number that stands for the operation."""
        runtime, targets = find() or for_collective(), tensors if in_place else None
        entries = start(runtime, self._runner.adapter, collective, name, tensors, options, targets)
        return runtime.handles.add(Operation(entries, shape_result))

    def _start_in_place(
        self, collective: str, tensor: T, name: str | None, options: CallOptions
    ) -> int:
        """Do as `_start` does for one tensor, soonest where its name has come before."""
        if name is not None:
            runtime = find() or for_collective()
            adapter = self._runner.adapter
            again = RepeatedCall.start(runtime, adapter, f"{collective}.{name}", tensor, options)
            if again is not None:
                return runtime.handles.add(again)
        return self._start(collective, [tensor], name, options, only, in_place=True)

    def _run_in_place(
        self, collective: str, tensors: Tensors[T], name: str | None, options: CallOptions
    ) -> list[T]:
        """Start, wait, and return the tensors, which have the results."""
        if name is not None and len(tensors) == 1:
            runtime, adapter = find() or for_collective(), self._runner.adapter
            label = f"{collective}.{name}"
            again = RepeatedCall.start(runtime, adapter, label, tensors[0], options, waits=True)
            if again is not None:
                return [again.wait()]
        operation = self._runner.start(
            collective, tensors, name, options, in_place=True, waits=True
        )
        return operation.wait_for_tensors()

    def poll(self, handle: int) -> bool:
        """Return whether the operation has ended, so that `synchronize` will not wait.

        Raises `ValueError` for a handle that was not created, or was synchronized already.
        """
        return bool(for_collective().handles.get(handle).poll())

    def synchronize(self, handle: int) -> Any:
        """Wait for an operation and return its result; None for an unknown or a used handle.

        The result is a tensor; a list or tuple for grouped forms; ``(output, received_splits)``
        for alltoall. Raises `HorovodInternalError` when the operation failed.
        """
        operation = (find() or for_collective()).handles.take(handle)
        return None if operation is None else operation.wait()
