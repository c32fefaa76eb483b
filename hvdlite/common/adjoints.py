"""Gradients of the collectives, by Horovod's law.

The law differs from the true adjoint of a loss that is summed over all ranks by a factor of
1/size for allgather and broadcast, and of size for reducescatter; scripts rely on it.
Tensors are those of any framework: only rows are cut, and numbers multiplied.
"""

from __future__ import annotations

from typing import Any

from hvdlite.common.operations import Operation
from hvdlite.common.reduce_op import ReduceOp


def own_rows(gradient: Any, first_dims: tuple[int, ...], position: int) -> Any:
    """The rows of an allgather's output that came from the member at `position`."""
    start = sum(first_dims[:position])
    return gradient[start : start + first_dims[position]]


def reducescatter_scale(operation: Operation[Any], size: int) -> float:
    """What the allgathered gradient of a reducescatter is multiplied with."""
    request = operation.entries[0].request
    scale = request.prescale_factor * request.postscale_factor
    return scale * size if request.reduce_op == ReduceOp.SUM else scale
