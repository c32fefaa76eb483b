"""The two spellings of every method of a process group: tensors with options, or one by one.

``group.allreduce([tensor], options)`` is what torch calls; ``group.allreduce(tensor, op)`` is for
people. The functions return what both mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvdlite.common.base.reduce_op import ReduceOp

_NONE = timedelta(0)
Tensors = Sequence[torch.Tensor]


def as_list(tensors: torch.Tensor | Tensors) -> list[torch.Tensor]:
    """Return one or more tensors as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def as_lists(
    many: Sequence[Any], one: torch.Tensor | Tensors
) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Return lists of tensors, one for each of the single tensors, and these."""
    if isinstance(one, torch.Tensor):
        return [list(many)], [one]
    return [list(each) for each in many], list(one)


def op_of(options: Any) -> Any:
    """Return the reduction that options, or an argument, say."""
    if options is None:
        return dist.ReduceOp.SUM
    return getattr(options, "reduceOp", options)


def root_of(options: Any) -> int:
    """Return the rank in the group that options, or an argument, say."""
    return int(getattr(options, "rootRank", options))


def timeout_of(options: Any, timeout: Any, default: timedelta) -> timedelta:
    """Return how long to wait: what the call says, or the timeout of the group."""
    said = timeout if isinstance(timeout, timedelta) else getattr(options, "timeout", None)
    return said if isinstance(said, timedelta) and said > _NONE else default


# -- the reductions of torch as those of the engine

_SAME = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.AVERAGE,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    dist.ReduceOp.BAND: ReduceOp.BAND,
    dist.ReduceOp.BOR: ReduceOp.BOR,
    dist.ReduceOp.BXOR: ReduceOp.BXOR,
}


def translate(op: Any) -> tuple[ReduceOp, float]:
    """Return the reduction, and the factor by which tensors are multiplied before it.

    `op` is an op of ``torch.distributed.ReduceOp``. Raises `ValueError` for one that hvdlite lacks.
    """
    kind = getattr(op, "op", op)  # The options of a call hold the op in an object of its own.
    same = _SAME.get(kind)
    if same is not None:
        return same, 1.0
    if kind == dist.ReduceOp.PREMUL_SUM:
        _, factor = op.__getstate__()
        return ReduceOp.SUM, float(factor)  # A number, or a tensor of one element.
    names = ", ".join(getattr(each, "name", str(each)) for each in _SAME)
    raise ValueError(
        f"the process group hvdlite has no ReduceOp.{getattr(op, 'name', op)}: use one of {names}, "
        "PREMUL_SUM"
    )
