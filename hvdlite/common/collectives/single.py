"""The backend of a group of one: copy and scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.base import Activity, Array, Group, Reduction
from hvdlite.common.collectives.kernels import Arithmetic


class SingleBackend:
    """Everything a group of one member can ask for; nothing is sent."""

    name = "SINGLE"

    def supports(
        self, collective: str, dtype: np.dtype[Any], reduce_op: ReduceOp, group: Group
    ) -> bool:
        """Any collective, when the group has one member."""
        return group.size == 1

    def allreduce(
        self,
        group: Group,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        """The only contribution, scaled."""
        if reduction.reduce_op == ReduceOp.ADASUM:  # of one vector: the vector
            reduction = Reduction(ReduceOp.SUM, reduction.prescale, reduction.postscale)
        with activity("SINGLE_REDUCE"):
            for source, output in zip(inputs, outputs, strict=True):
                Arithmetic(source.dtype, reduction).reduce([source], output)

    def reducescatter(
        self,
        group: Group,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        """The whole tensors, scaled."""
        self.allreduce(group, inputs, outputs, reduction, activity)

    def allgather(
        self,
        group: Group,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        activity: Activity,
    ) -> None:
        """A copy."""
        with activity("SINGLE_COPY"):
            for source, output in zip(inputs, outputs, strict=True):
                np.copyto(output, source)

    def broadcast(self, group: Group, array: Array, root: int, activity: Activity) -> None:
        """Nothing to do."""

    def alltoall(
        self,
        group: Group,
        array: Array,
        send_counts: Sequence[int],
        allocate: Callable[[list[int]], Array],
        activity: Activity,
    ) -> None:
        """A copy."""
        with activity("SINGLE_COPY"):
            np.copyto(allocate(list(send_counts)), array[: send_counts[0]])
