"""The public forms of every collective, written once for the tensors of any framework.

Each verb has the forms that Horovod has: ``x`` (blocking), ``x_async`` (a handle), ``x_`` and
``x_async_`` (in place), ``grouped_x``. A framework's module makes one `Forms` of its adapter and
publishes the methods under their names; all of them take tensors of that framework.

Common to all: `name` identifies the tensor across ranks (unnamed calls are numbered, so those of
one process set must come in the same order on all its ranks); `process_set` limits the call to some
ranks, all of which must make it. Raises `ValueError` for what is wrong on this rank, at the call,
and `HorovodInternalError` for what ranks disagree on or when one is lost, when the result is taken.
"""

from __future__ import annotations

from typing import Any, TypeVar

from hvdlite.common.api.options import CallOptions, reduction, scattering
from hvdlite.common.api.starting_forms import StartingForms, Tensors, as_tuple, only
from hvdlite.common.api.submit import Operation, Signal, as_list
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.tensors.compression import Compressor, NoneCompressor

T = TypeVar("T")


class Forms(StartingForms[T]):
    """The public functions for one framework's tensors, which `runner` runs."""

    # -- allreduce

    def allreduce_async(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start to reduce a tensor over all ranks into a new one; a handle for `synchronize`.

        Every rank gives a tensor of the same shape and dtype. `op` is Average (default), Sum, Min,
        Max, Product or Adasum. Integers are averaged as their sum times 1/size, truncated toward
        zero; 16-bit floats are summed in float32. `prescale_factor` multiplies before and
        `postscale_factor` after the reduction. A joined rank does not count.
        """
        options = reduction(average, op, prescale_factor, postscale_factor, process_set)
        return self._start("allreduce", [tensor], name, options, only)

    def allreduce_async_(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Do as `allreduce_async` does; the result is written into `tensor`."""
        options = reduction(average, op, prescale_factor, postscale_factor, process_set)
        return self._start_in_place("allreduce", tensor, name, options)

    def allreduce(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        compression: type[Compressor] = NoneCompressor,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Do as `allreduce_async` does, and wait: the reduced tensor.

        Differentiable: the gradient is reduced in the same way. `compression` makes the tensor
        smaller while it is sent.
        """
        options = reduction(average, op, prescale_factor, postscale_factor, process_set)
        return self._verbs.allreduce([tensor], name, compression, options)[0]

    def allreduce_(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Do as `allreduce_async_` does, and wait: `tensor`, reduced."""
        options = reduction(average, op, prescale_factor, postscale_factor, process_set)
        return self._run_in_place("allreduce", [tensor], name, options)[0]

    def grouped_allreduce_async(
        self,
        tensors: Tensors[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Do as `allreduce_async` does for several tensors, of which all or none are reduced."""
        options = reduction(average, op, prescale_factor, postscale_factor, process_set, True)
        return self._start("allreduce", tensors, name, options, as_list)

    def grouped_allreduce_async_(
        self,
        tensors: Tensors[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Do as `grouped_allreduce_async` does; the results are written into `tensors`."""
        options = reduction(average, op, prescale_factor, postscale_factor, process_set, True)
        return self._start("allreduce", tensors, name, options, as_tuple, in_place=True)

    def grouped_allreduce(
        self,
        tensors: Tensors[T],
        average: bool | None = None,
        name: str | None = None,
        compression: type[Compressor] = NoneCompressor,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[T]:
        """Do as `allreduce` does for several tensors, of which all or none are reduced: a list."""
        options = reduction(average, op, prescale_factor, postscale_factor, process_set, True)
        return self._verbs.allreduce(tensors, name, compression, options)

    def grouped_allreduce_(
        self,
        tensors: Tensors[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> tuple[T, ...]:
        """Do as `grouped_allreduce_async_` does, and wait: `tensors` as a tuple."""
        options = reduction(average, op, prescale_factor, postscale_factor, process_set, True)
        return tuple(self._run_in_place("allreduce", tensors, name, options))

    # -- allgather

    def allgather_async(
        self, tensor: T, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Start to concatenate the tensors of all ranks along the first dimension; a handle.

        Only the first dimension may differ between ranks. A joined rank gives no rows.
        """
        return self._start("allgather", [tensor], name, CallOptions(process_set), only)

    def allgather(
        self, tensor: T, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """Do as `allgather_async` does, and wait: the rows of all ranks, in rank order.

        Differentiable: the gradient is averaged over the ranks, and each keeps its own rows.
        """
        return self._verbs.gather([tensor], name, CallOptions(process_set))[0]

    def grouped_allgather_async(
        self,
        tensors: Tensors[T],
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Do as `allgather_async` does for several tensors, of which all or none are gathered."""
        options = CallOptions(process_set, grouped=True)
        return self._start("allgather", tensors, name, options, as_tuple)

    def grouped_allgather(
        self,
        tensors: Tensors[T],
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> tuple[T, ...]:
        """Do as `allgather` does for several tensors: a tuple."""
        return tuple(self._verbs.gather(tensors, name, CallOptions(process_set, grouped=True)))

    # -- broadcast

    def broadcast_async(
        self,
        tensor: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start to copy the tensor of the global rank `root_rank` to all; a handle.

        Every rank gives a tensor of the same shape and dtype; a new one is made on each.
        """
        options = CallOptions(process_set, root_rank=root_rank)
        return self._start("broadcast", [tensor], name, options, only)

    def broadcast_async_(
        self,
        tensor: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Do as `broadcast_async` does; the result is written into `tensor`."""
        options = CallOptions(process_set, root_rank=root_rank)
        return self._start_in_place("broadcast", tensor, name, options)

    def broadcast(
        self,
        tensor: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Do as `broadcast_async` does, and wait: a copy of the root's tensor.

        Differentiable: the gradient is averaged on the root, and zero elsewhere.
        """
        return self._verbs.copy(tensor, name, CallOptions(process_set, root_rank=root_rank))

    def broadcast_(
        self,
        tensor: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Do as `broadcast_async_` does, and wait: `tensor`, with the root's values."""
        options = CallOptions(process_set, root_rank=root_rank)
        return self._run_in_place("broadcast", [tensor], name, options)[0]

    # -- alltoall

    def alltoall_async(
        self,
        tensor: T,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start to send the next ``splits[i]`` rows to rank i, for all i; a handle.

        Rows beyond the sum of the splits are not sent.

        Without `splits` (a list, or a row of integers) every rank gets the same number of rows.
        `synchronize` gives ``(output, received_splits)``; rows come in the order of ranks.
        """

        def shape_result(operation: Operation[T], results: list[T]) -> Any:
            received = operation.entries[0].received_splits
            return results[0], self._runner.adapter.make_splits(received, splits)

        options = CallOptions(process_set, splits=splits)
        return self._start("alltoall", [tensor], name, options, shape_result)

    def alltoall(
        self,
        tensor: T,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """Do as `alltoall_async` does, and wait; with `splits`, return the received splits too.

        Differentiable: the gradient goes back the way that the rows came; it is zero for rows
        that were not sent.
        """
        output, received = self._verbs.exchange(
            tensor, name, CallOptions(process_set, splits=splits)
        )
        if splits is None:
            return output
        return output, self._runner.adapter.make_splits(received, splits)

    # -- reducescatter

    def reducescatter_async(
        self,
        tensor: T,
        name: str | None = None,
        op: int = ReduceOp.AVERAGE,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """Start to reduce a tensor and give each rank its part of the rows; a handle.

        Every rank gives a tensor of the same shape and dtype. Parts are as even as can be: the
        first ``rows % size`` ranks get one row more. `op` as in `allreduce_async`, without Adasum.
        """
        options = scattering(op, prescale_factor, postscale_factor, process_set)
        return self._start("reducescatter", [tensor], name, options, only)

    def reducescatter(
        self,
        tensor: T,
        name: str | None = None,
        compression: type[Compressor] = NoneCompressor,
        op: int = ReduceOp.AVERAGE,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> T:
        """Do as `reducescatter_async` does, and wait: this rank's rows.

        Differentiable: the gradient is gathered, times both factors, and times size for Sum.
        """
        options = scattering(op, prescale_factor, postscale_factor, process_set)
        return self._verbs.reducescatter([tensor], name, compression, options)[0]

    def grouped_reducescatter_async(
        self,
        tensors: Tensors[T],
        name: str | None = None,
        op: int = ReduceOp.AVERAGE,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """Do as `reducescatter_async` does for several tensors; all or none are reduced."""
        options = scattering(op, prescale_factor, postscale_factor, process_set, True)
        return self._start("reducescatter", tensors, name, options, as_list)

    def grouped_reducescatter(
        self,
        tensors: Tensors[T],
        name: str | None = None,
        compression: type[Compressor] = NoneCompressor,
        op: int = ReduceOp.AVERAGE,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[T]:
        """Do as `reducescatter` does for several tensors: a list."""
        options = scattering(op, prescale_factor, postscale_factor, process_set, True)
        return self._verbs.reducescatter(tensors, name, compression, options)

    # -- without a tensor

    def join(self, device: int = -1, process_set: ProcessSet = global_process_set) -> int:
        """Say that this rank has no more data, and wait until all ranks of the set say so.

        Until then the others' collectives go on without this rank: it counts for nothing in a
        reduction (an Average still divides by the size of the set) and gives no rows. Returns the
        global rank that joined last, the same on all ranks. `device` has no effect.
        """
        return Signal("join", process_set).wait()

    def barrier(self, process_set: ProcessSet = global_process_set) -> None:
        """Wait until all ranks of the set have called this.

        Calls are numbered: several threads may wait, and after an interrupt the next call meets
        the next one of the other ranks.
        """
        Signal("barrier", process_set, waits=True).wait()
