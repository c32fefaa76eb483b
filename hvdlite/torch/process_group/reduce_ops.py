"""The reductions of torch.distributed as those of the engine."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hvdlite.common.base.reduce_op import ReduceOp

_SAME = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.AVERAGE,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
    "PRODUCT": ReduceOp.PRODUCT,
    "BAND": ReduceOp.BAND,
    "BOR": ReduceOp.BOR,
    "BXOR": ReduceOp.BXOR,
}
PREMUL_SUM = "PREMUL_SUM"


def translate(op: Any) -> tuple[ReduceOp, float]:
    """Return the reduction, and the factor by which tensors are multiplied before it.

    `op` is an op of ``torch.distributed.ReduceOp``. Raises `ValueError` for one that hvdlite lacks.
    """
    kind = getattr(op, "op", op)  # The options of a call hold the op in an object of its own.
    name = getattr(kind, "name", str(kind))
    if name in _SAME:
        return _SAME[name], 1.0
    if name == PREMUL_SUM:
        return ReduceOp.SUM, _factor(op)
    raise ValueError(
        f"the process group hvdlite has no ReduceOp.{name}: use one of "
        f"{', '.join((*_SAME, PREMUL_SUM))}"
    )


def _factor(op: Any) -> float:
    _, factor = op.__getstate__()
    return float(factor)  # A number, or a tensor of one element.


def default_op() -> Any:
    """Return what torch reduces by where nothing is said."""
    return dist.ReduceOp.SUM
