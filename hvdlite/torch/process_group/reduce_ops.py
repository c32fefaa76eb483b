"""The reductions of torch.distributed as those of the engine."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hvdlite.common.base.reduce_op import ReduceOp

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
        return ReduceOp.SUM, _factor(op)
    names = ", ".join(getattr(each, "name", str(each)) for each in _SAME)
    raise ValueError(
        f"the process group hvdlite has no ReduceOp.{getattr(op, 'name', op)}: use one of {names}, "
        "PREMUL_SUM"
    )


def _factor(op: Any) -> float:
    _, factor = op.__getstate__()
    return float(factor)  # A number, or a tensor of one element.


def default_op() -> Any:
    """Return what torch reduces by where nothing is said."""
    return dist.ReduceOp.SUM
