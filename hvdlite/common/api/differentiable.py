"""The blocking collectives with their gradients, written once for the tensors of any framework.

The gradients follow Horovod's law, on which scripts rely. It differs from the true adjoint of a
loss that is summed over all ranks by a factor of 1/size for allgather and broadcast, and of size
for reducescatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from hvdlite.common.api.options import Options
from hvdlite.common.api.submit import members_of
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.table import ROWS, Effect
from hvdlite.common.plain.compression import Compressor
from hvdlite.common.plain.entries import Entry
from hvdlite.common.plain.messages import Request
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.runtime.state import for_collective

T = TypeVar("T")
Function = Callable[[list[T]], list[T]]


class Outcome(NamedTuple):
    """What a collective has given."""

    tensors: list[Any]
    rows: list[Any]  # of each tensor: how many came from each member, where that may differ


class Verbs(Generic[T]):
    """The collectives as functions from tensors to new tensors.

    A framework says how one is run (`run`), and how it is recorded for its gradient.
    """

    def run(
        self, collective: str, tensors: Sequence[T], name: str | None, options: Options
    ) -> Outcome:
        """One collective on one tensor or on a group, from the call to its result."""
        raise NotImplementedError

    def differentiable(
        self, tensors: Sequence[T], forward: Function[T], adjoint: Function[T]
    ) -> list[T]:
        """``forward(tensors)``, recorded so that gradients flow back through `adjoint`."""
        return forward(list(tensors))

    def zeros_like(self, tensor: T) -> T:
        """A tensor of zeros of the same shape, dtype and device."""
        zero: Any = tensor
        return zero * 0  # type: ignore[no-any-return]

    def own_rows(self, tensor: T, rows: Any, position: int) -> T:
        """The part of `tensor` that came from the member at `position`, by the rows of each."""
        start = sum(rows[:position])
        whole: Any = tensor
        return whole[start : start + rows[position]]  # type: ignore[no-any-return]

    def reduce(
        self,
        collective: str,
        tensors: Sequence[T],
        name: str | None,
        compression: type[Compressor],
        options: Options,
    ) -> list[T]:
        """allreduce or reducescatter; the tensors are made smaller while they travel."""
        packed = [compression.compress(tensor) for tensor in tensors]
        verb = {"allreduce": self._allreduce, "reducescatter": self._reducescatter}[collective]
        results = verb([small for small, _ in packed], name, options)
        return [
            compression.decompress(result, ctx)
            for result, (_, ctx) in zip(results, packed, strict=True)
        ]

    def _allreduce(self, tensors: list[T], name: str | None, options: Options) -> list[T]:
        """The gradient is reduced in the same way."""
        return self.differentiable(
            tensors,
            lambda inputs: self.run("allreduce", inputs, name, options).tensors,
            lambda gradients: self._allreduce(gradients, _gradient_name(name), options),
        )

    def _reducescatter(self, tensors: list[T], name: str | None, options: Options) -> list[T]:
        """The gradient is gathered, times both factors, and times size for Sum."""
        back = Options(options.process_set, grouped=options.grouped)

        def adjoint(gradients: list[T]) -> list[T]:
            scale = options.prescale_factor * options.postscale_factor
            if options.reduce_op is ReduceOp.SUM:
                scale *= options.process_set.size()
            gathered: list[Any] = self.gather(gradients, _gradient_name(name), back)
            return [gradient * scale for gradient in gathered]

        return self.differentiable(
            tensors,
            lambda inputs: self.run("reducescatter", inputs, name, options).tensors,
            adjoint,
        )

    def gather(self, tensors: Sequence[T], name: str | None, options: Options) -> list[T]:
        """allgather; the gradient is averaged over the ranks, and each keeps its own rows."""
        rows: list[Any] = []

        def forward(inputs: list[T]) -> list[T]:
            outcome = self.run("allgather", inputs, name, options)
            rows[:] = outcome.rows
            return outcome.tensors

        def adjoint(gradients: list[T]) -> list[T]:
            averaged = self._allreduce(gradients, _gradient_name(name), options)
            position = _position(options.process_set)
            return [
                self.own_rows(gradient, own, position)
                for gradient, own in zip(averaged, rows, strict=True)
            ]

        return self.differentiable(tensors, forward, adjoint)

    def copy(self, tensor: T, name: str | None, options: Options) -> T:
        """broadcast; the gradient is averaged on the root, and zero elsewhere."""

        def adjoint(gradients: list[T]) -> list[T]:
            back = Options(options.process_set)
            averaged = self._allreduce(gradients, _gradient_name(name), back)
            return self._only_where(for_collective().rank == options.root_rank, averaged)

        def forward(inputs: list[T]) -> list[T]:
            return self.run("broadcast", inputs, name, options).tensors

        return self.differentiable([tensor], forward, adjoint)[0]

    def _only_where(self, here: bool, tensors: list[T]) -> list[T]:
        """The tensors, or zeros on ranks where it is not `here`; gradients flow in the same way.

        All ranks record the same, so that what these gradients come to runs on all of them.
        """
        return self.differentiable(
            tensors,
            lambda inputs: inputs if here else [self.zeros_like(each) for each in inputs],
            lambda gradients: self._only_where(here, gradients),
        )

    def exchange(self, tensor: T, name: str | None, options: Options) -> tuple[T, Any]:
        """alltoall: the output, and how many of its rows came from each.

        The gradient goes back the way that the rows came.
        """
        received: list[Any] = []

        def forward(inputs: list[T]) -> list[T]:
            outcome = self.run("alltoall", inputs, name, options)
            received[:] = outcome.rows
            return outcome.tensors

        def adjoint(gradients: list[T]) -> list[T]:
            back = Options(options.process_set, splits=received[0])
            return [self.exchange(gradients[0], _gradient_name(name), back)[0]]

        (output,) = self.differentiable([tensor], forward, adjoint)
        return output, received[0]

    # -- without a tensor

    def join(self, device: int = -1, process_set: ProcessSet = global_process_set) -> int:
        """This rank has no more data: wait until all ranks of the set say so.

        Until then the others' collectives go on without this rank: it counts for nothing in a
        reduction (an Average still divides by the size of the set) and gives no rows. Returns the
        global rank that joined last, the same on all ranks. `device` has no effect.
        """
        return Signal("join", process_set).wait()

    def barrier(self, process_set: ProcessSet = global_process_set) -> None:
        """Wait until all ranks of the set have called this."""
        Signal("barrier", process_set).wait()


class Signal:
    """A collective without a tensor, from its start on."""

    def __init__(
        self, collective: str, process_set: ProcessSet, runtime: Runtime | None = None
    ) -> None:
        self._runtime = runtime or for_collective()
        self._process_set = process_set
        members_of(self._runtime, collective, process_set)
        number = process_set.process_set_id or 0
        entry = Entry(Request(number, f"{collective}.noname", collective))
        self._runtime.engine.enqueue([entry])
        self.collective = collective
        self.handle = entry.handle

    def wait(self) -> int:
        """Sleep until all ranks have come; the rank that joined last, where it is a join."""
        last = int(self.handle.wait() or 0)
        if (
            ROWS[self.collective].effect is Effect.JOIN
        ):  # ranks have made different numbers of calls
            self._runtime.restart(self._process_set)
        return last


def _gradient_name(name: str | None) -> str | None:
    """The name of the collective that runs backward, after that of the one that ran forward."""
    return None if name is None else f"{name}.gradient"


def _position(process_set: ProcessSet) -> int:
    runtime = for_collective()
    return members_of(runtime, "gradient", process_set).index(runtime.rank)
