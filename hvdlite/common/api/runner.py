"""The runner of collectives on the tensors of one framework, from the call to the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.prepared_bucket import PreparedBucket, start_bucket
from hvdlite.common.api.submit import Operation, as_list, start
from hvdlite.common.runtime.current import for_collective
from hvdlite.common.tensors.adapter import Adapter

T = TypeVar("T")
Function = Callable[[list[T]], list[T]]
Shaping = Callable[[Operation[T], list[T]], Any]


class CollectiveResult(NamedTuple):
    """The result of one collective on this rank."""

    tensors: list[Any]
    rows: list[Any]  # of each tensor: how many came from each member, where that may differ


class Runner(Generic[T]):
    """The part of a framework that collectives need; those after `record` serve gradients only."""

    def run(
        self, collective: str, tensors: Sequence[T], name: str | None, options: CallOptions
    ) -> CollectiveResult:
        """Run one collective on one tensor or on a group, without a gradient; return its result."""
        raise NotImplementedError

    def record(self, tensors: Sequence[T], forward: Function[T], adjoint: Function[T]) -> list[T]:
        """Return ``forward(tensors)``, recorded so that gradients flow back through `adjoint`."""
        return forward(list(tensors))

    def ask(self, question: Callable[[], int]) -> Any:
        """Return a number of the world: the answer of now.

        A graph that outlives the world asks whenever it is run.
        """
        return question()

    def times(self, tensor: Any, scale: float, number: Any) -> Any:
        """Return the tensor times `scale` and a number of the world."""
        return tensor * (scale * number)

    def where(self, here: Any, tensor: T) -> T:
        """Return the tensor, or zeros in its place if `here`, a number of the world, is 0."""
        return tensor if here else self.zeros_like(tensor)

    def zeros_like(self, tensor: T) -> T:
        """Return a tensor of zeros of the same shape, dtype and device."""
        raise NotImplementedError

    def own_rows(self, tensor: T, rows: Any, position: Any) -> T:
        """Return the part that came from the member at `position`, by `rows` of each."""
        raise NotImplementedError

    def row_count(self, tensor: T) -> Any:
        """Return the size of the first dimension."""
        raise NotImplementedError

    def padded(self, tensor: T, rows: Any) -> T:
        """Return the tensor with rows of zeros behind it, `rows` in all."""
        raise NotImplementedError


class EngineRunner(Runner[T]):
    """Runs collectives on tensors that have their values, by the adapter of their framework."""

    def __init__(self, adapter: Adapter[T]) -> None:
        self.adapter = adapter

    def start(
        self,
        collective: str,
        tensors: Sequence[T],
        name: str | None,
        options: CallOptions,
        *,
        in_place: bool = False,
        waits: bool = False,
        shape_result: Shaping[T] = as_list,
    ) -> Operation[T]:
        """Enqueue one collective on one tensor or on a group; never wait.

        `waits` says that the calling thread waits for it next.
        """
        runtime, targets = for_collective(), tensors if in_place else None
        entries = start(
            runtime, self.adapter, collective, name, tensors, options, targets, waits=waits
        )
        return Operation(entries, shape_result)

    def start_bucket(
        self,
        names: Sequence[str],
        tensors: Sequence[T],
        options: CallOptions,
        *,
        alone: bool = False,
    ) -> PreparedBucket[T]:
        """Start to reduce tensors in place in one call, each under its name; never wait.

        See `PreparedBucket.start` for `alone`.
        """
        return start_bucket(for_collective(), self.adapter, names, tensors, options, alone=alone)

    def run(
        self, collective: str, tensors: Sequence[T], name: str | None, options: CallOptions
    ) -> CollectiveResult:
        """Start, and wait."""
        operation = self.start(collective, tensors, name, options, waits=True)
        return CollectiveResult(
            operation.wait_for_tensors(), [entry.rows for entry in operation.entries]
        )

    def row_count(self, tensor: T) -> int:
        """Return the size of the first dimension; 0 where there is none."""
        shape = self.adapter.spec(tensor).shape
        return shape[0] if shape else 0
