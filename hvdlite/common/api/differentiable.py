"""The blocking collectives with their gradients, written once for the tensors of any framework.

The gradients follow Horovod's law, on which scripts rely. It differs from the true adjoint of a
loss that is summed over all ranks by a factor of 1/size for allgather and broadcast, and of size
for reducescatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from hvdlite.common.api.call_checks import members_of
from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.runner import Runner
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.runtime.current import for_collective
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.tensors.compression import Compressor

T = TypeVar("T")


class Verbs(Generic[T]):
    """The collectives as functions from tensors to new tensors, run by a framework's `runner`."""

    def __init__(self, runner: Runner[T]) -> None:
        self._runner = runner

    def allreduce(
        self,
        tensors: Sequence[T],
        name: str | None,
        compression: type[Compressor],
        options: CallOptions,
    ) -> list[T]:
        """Reduce tensors, which `compression` makes smaller while they are sent.

        The gradient is reduced in the same way.
        """
        return _compressed(self._allreduce, tensors, name, compression, options)

    def reducescatter(
        self,
        tensors: Sequence[T],
        name: str | None,
        compression: type[Compressor],
        options: CallOptions,
    ) -> list[T]:
        """Reduce tensors, which `compression` makes smaller, and keep this rank's rows.

        The gradient is gathered, times both factors, and times size for Sum.
        """
        return _compressed(self._reducescatter, tensors, name, compression, options)

    def _allreduce(self, tensors: list[T], name: str | None, options: CallOptions) -> list[T]:
        return self._runner.record(
            tensors,
            lambda inputs: self._runner.run("allreduce", inputs, name, options).tensors,
            lambda gradients: self._allreduce(gradients, _gradient_name(name), options),
        )

    def _reducescatter(self, tensors: list[T], name: str | None, options: CallOptions) -> list[T]:
        back = CallOptions(options.process_set, grouped=options.grouped)

        def adjoint(gradients: list[T]) -> list[T]:
            scale = options.prescale_factor * options.postscale_factor
            gathered: list[Any] = self.gather(gradients, _gradient_name(name), back)
            if options.reduce_op is not ReduceOp.SUM:
                return [gradient * scale for gradient in gathered]
            size = self._runner.ask(options.process_set.size)
            return [self._runner.times(gradient, scale, size) for gradient in gathered]

        return self._runner.record(
            tensors,
            lambda inputs: self._runner.run("reducescatter", inputs, name, options).tensors,
            adjoint,
        )

    def gather(self, tensors: Sequence[T], name: str | None, options: CallOptions) -> list[T]:
        """Gather tensors; the gradient is averaged, and each rank keeps its own rows."""
        rows: list[Any] = []

        def forward(inputs: list[T]) -> list[T]:
            result = self._runner.run("allgather", inputs, name, options)
            rows[:] = result.rows
            return result.tensors

        def adjoint(gradients: list[T]) -> list[T]:
            averaged = self._allreduce(gradients, _gradient_name(name), options)
            position = self._runner.ask(lambda: _position(options.process_set))
            return [
                self._runner.own_rows(gradient, own, position)
                for gradient, own in zip(averaged, rows, strict=True)
            ]

        return self._runner.record(tensors, forward, adjoint)

    def copy(self, tensor: T, name: str | None, options: CallOptions) -> T:
        """Broadcast a tensor; the gradient is averaged on the root, and zero elsewhere."""

        def adjoint(gradients: list[T]) -> list[T]:
            back = CallOptions(options.process_set)
            averaged = self._allreduce(gradients, _gradient_name(name), back)
            return self._only_on(options.root_rank, averaged)

        def forward(inputs: list[T]) -> list[T]:
            return self._runner.run("broadcast", inputs, name, options).tensors

        return self._runner.record([tensor], forward, adjoint)[0]

    def _only_on(self, root_rank: int, tensors: list[T]) -> list[T]:
        """Return the tensors, or zeros on all ranks but one; so for gradients.

        All ranks record the same, so that what these gradients come to runs on all of them.
        """

        def forward(inputs: list[T]) -> list[T]:
            here = self._runner.ask(lambda: int(for_collective().rank == root_rank))
            return [self._runner.where(here, each) for each in inputs]

        return self._runner.record(
            tensors, forward, lambda gradients: self._only_on(root_rank, gradients)
        )

    def exchange(self, tensor: T, name: str | None, options: CallOptions) -> tuple[T, Any]:
        """Exchange rows by alltoall; return the output, and the number of rows from each member.

        The gradient goes back the way that the rows came; rows that were sent to nobody get zeros.
        """
        received: list[Any] = []
        given: list[Any] = []

        def forward(inputs: list[T]) -> list[T]:
            result = self._runner.run("alltoall", inputs, name, options)
            received[:] = result.rows
            if options.splits is not None:
                given[:] = [self._runner.row_count(inputs[0])]
            return result.tensors

        def adjoint(gradients: list[T]) -> list[T]:
            back = CallOptions(options.process_set, splits=received[0])
            returned, _ = self.exchange(gradients[0], _gradient_name(name), back)
            return [self._runner.padded(returned, rows) for rows in given] or [returned]

        (output,) = self._runner.record([tensor], forward, adjoint)
        return output, received[0]


def _compressed(
    verb: Callable[[list[T], str | None, CallOptions], list[T]],
    tensors: Sequence[T],
    name: str | None,
    compression: type[Compressor],
    options: CallOptions,
) -> list[T]:
    packed = [compression.compress(tensor) for tensor in tensors]
    results = verb([small for small, _ in packed], name, options)
    return [
        compression.decompress(result, ctx)
        for result, (_, ctx) in zip(results, packed, strict=True)
    ]


def _gradient_name(name: str | None) -> str | None:
    """Return the name of the collective in backward, made from that of the one in forward."""
    return None if name is None else f"{name}.gradient"


def _position(process_set: ProcessSet) -> int:
    runtime = for_collective()
    return members_of(runtime, "gradient", process_set).index(runtime.rank)
