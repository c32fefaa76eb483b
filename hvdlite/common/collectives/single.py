"""The backend of a single member: copy and scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.base import Activity, Array, Members, Reduction
from hvdlite.common.collectives.kernels import Arithmetic


class SingleBackend:
    """Every collective of a single member; nothing is sent."""

    name = "SINGLE"

    def supports(
        self, collective: str, dtype: np.dtype[Any], reduce_op: ReduceOp, members: Members
    ) -> bool:
        """Support any collective of a single member."""
        return members.size == 1

    def allreduce(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        """Copy the only contribution, scaled."""
        if reduction.reduce_op == ReduceOp.ADASUM:  # of one vector: the vector
            reduction = Reduction(ReduceOp.SUM, reduction.prescale, reduction.postscale)
        with activity("SINGLE_REDUCE"):
            for source, output in zip(inputs, outputs, strict=True):
                Arithmetic(source.dtype, reduction).reduce([source], output)

    def reducescatter(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        """Copy the whole tensors, scaled."""
        self.allreduce(members, inputs, outputs, reduction, activity)

    def allgather(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        activity: Activity,
    ) -> None:
        """Copy the tensor."""
        with activity("SINGLE_COPY"):
            for source, output in zip(inputs, outputs, strict=True):
                np.copyto(output, source)

    def broadcast(
        self, members: Members, arrays: Sequence[Array], root: int, activity: Activity
    ) -> None:
        """Nothing to do."""

    def alltoall(
        self,
        members: Members,
        array: Array,
        send_counts: Sequence[int],
        allocate: Callable[[list[int]], Array],
        activity: Activity,
    ) -> None:
        """Copy the tensor."""
        with activity("SINGLE_COPY"):
            np.copyto(allocate(list(send_counts)), array[: send_counts[0]])
