"""Reduce to one rank: for process groups, as the modules of the frameworks do not publish it."""

from __future__ import annotations

from typing import Any, TypeVar

from hvdlite.common.api.options import reducing
from hvdlite.common.api.submit import Operation, start
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.plain.adapter import Adapter
from hvdlite.common.plain.numpy_adapter import NumpyAdapter
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.runtime.state import for_collective

T = TypeVar("T")

_NUMPY: Adapter[Any] = NumpyAdapter()


def reduce_async(
    tensor: T,
    root_rank: int,
    name: str | None = None,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    in_place: bool = False,
    adapter: Adapter[T] = _NUMPY,
) -> Operation[T]:
    """Start to reduce a tensor over all ranks for the global rank `root_rank`.

    Every rank gives a tensor of the same shape and dtype. `op` as in `Forms.allreduce_async`,
    without Adasum. The ``wait()`` of what it returns gives the result on the root, and None on the
    others; `in_place` it gives `tensor`, into which the root's result is written, while the others
    keep theirs. Raises as all forms.
    """
    options = reducing(op, root_rank, prescale_factor, postscale_factor, process_set)
    runtime, targets = for_collective(), [tensor] if in_place else None
    entries = start(runtime, adapter, "reduce", name, [tensor], options, targets)
    has_result = in_place or runtime.rank == root_rank
    return Operation(entries, _only if has_result else _nothing)


def reduce(tensor: T, root_rank: int, *arguments: Any, **options: Any) -> T | None:
    """Do as `reduce_async` does, which has the same arguments, and wait."""
    result: T | None = reduce_async(tensor, root_rank, *arguments, **options).wait()
    return result


def _only(operation: Operation[Any], results: list[Any]) -> Any:
    return results[0]


def _nothing(operation: Operation[Any], results: list[Any]) -> Any:
    return None
