"""Collectives over several hosts with one member each: one of `algorithms`, chosen by size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.base import Activity, Array, Members, Reduction
from hvdlite.common.collectives.between_hosts.algorithms import Choice
from hvdlite.common.collectives.between_hosts.pipeline import RingOrder
from hvdlite.common.collectives.host_backends.backend import HostsBackend
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.transport.base import Transport


class FlatBackend(HostsBackend):
    """All collectives among hosts of one member each."""

    name = "FLAT"

    def __init__(self, transport: Transport, choice: Choice) -> None:
        super().__init__(transport, None, choice=choice)

    def supports(
        self, collective: str, dtype: np.dtype[Any], reduce_op: ReduceOp, members: Members
    ) -> bool:
        """Support all but Adasum, among three hosts or more; between two there is one choice."""
        hosts = members.topology.hosts
        fewest = 2 if collective == "allreduce" else 3
        flat = len(hosts) == members.size >= fewest
        return flat and reduce_op != ReduceOp.ADASUM

    def allreduce(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        if not inputs:
            return
        order, arithmetic = RingOrder.of(members), Arithmetic(inputs[0].dtype, reduction)
        for algorithm, numbers in self._choice.groups(members.size, 1, inputs).items():
            part = [inputs[number] for number in numbers], [outputs[number] for number in numbers]
            with activity(f"{algorithm.phase}_ALLREDUCE"):
                self.allreduce_by(algorithm, order, *part, arithmetic)
