"""The public forms of allreduce; `forms` says what all forms have in common."""

from __future__ import annotations

from typing import TypeVar

from hvdlite.common.api.options import reduction
from hvdlite.common.api.starting_forms import StartingForms, Tensors, as_tuple, only
from hvdlite.common.api.submit import as_list
from hvdlite.common.plain.compression import Compressor, NoneCompressor
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set

T = TypeVar("T")


class AllreduceForms(StartingForms[T]):
    """The forms of allreduce for one framework's tensors."""

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
