"""How the public forms start calls, blocking and not, in place and not, and take results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from hvdlite.common.api.differentiable import Verbs
from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.runner import EngineRunner, Shaping
from hvdlite.common.api.submit import Operation, start
from hvdlite.common.api.tensor_entries import PlacedEntry, PreparedCall
from hvdlite.common.runtime.current import find, for_collective
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.tensors.adapter import Adapter

# Calls on one tensor in place that come again in each step: one object serves all of them.
T = TypeVar("T")


class RepeatedCall(Generic[T]):
    """The operation behind a user's handle. Its entry is renewed when the name comes again.

    While nobody uses it, it lies in `Runtime.repeated` under its name, until calls are forgotten.
    """

    __slots__ = ("_adapter", "_call", "_entry", "_kept", "_name")

    def __init__(
        self,
        kept: dict[str, RepeatedCall[T]],
        adapter: Adapter[T],
        name: str,
        call: PreparedCall,
        entry: PlacedEntry[T],
    ) -> None:
        # `Runtime.repeated` as it was when the call was made: another one once calls are forgotten.
        self._kept, self._adapter, self._name = kept, adapter, name
        self._call, self._entry = call, entry

    @classmethod
    def start(
        cls,
        runtime: Runtime,
        adapter: Adapter[T],
        name: str,
        tensor: T,
        options: CallOptions,
        *,
        waits: bool = False,
    ) -> RepeatedCall[T] | None:
        """Enqueue a tensor in place, if it is like that of the last call under its name.

        `waits` says that the calling thread waits for it next. None for the first call, and
        for one that has other options, or a tensor of another kind.
        """
        known: RepeatedCall[T] | None = runtime.repeated.pop(name, None)
        call = runtime.requests.get(name) if known is None else known._call
        if type(call) is not PreparedCall or call.options is not options:
            return None
        place = adapter.place(tensor, call.spec)
        if place is None:
            return None
        if known is not None and known._adapter is adapter:
            entry = known._entry
            entry.handle.renew()
            entry.renew(tensor, place, entry.handle)
        else:
            entry = PlacedEntry(call, adapter, tensor, place)
            known = cls(runtime.repeated, adapter, name, call, entry)
        runtime.engine.enqueue((entry,), waits=waits)
        return known

    def poll(self) -> bool:
        """Return whether the tensor is reduced, or the call has failed."""
        return self._entry.handle.poll()

    def wait(self) -> T:
        """Sleep until the tensor is reduced; return it, or raise the error."""
        entry = self._entry
        entry.handle.wait()
        tensor = entry.result
        assert tensor is not None
        self._adapter.finish(tensor)
        entry.release()
        self._kept[self._name] = self
        return tensor


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
        for alltoall. A function that waits for its result, as `sparse_allreduce_async` returns, is
        called. Raises `HorovodInternalError` when the operation failed.
        """
        if callable(handle):
            return handle()
        operation = (find() or for_collective()).handles.take(handle)
        return None if operation is None else operation.wait()
