"""Allreduce over several hosts: shared memory inside a host, rings between the hosts.

With L slices, L being the number of members on the smallest host, and H hosts:

    1. inside each host      reduce-scatter by shared memory: local member l < L gets slice l
    2. across the hosts      L rings at a time: members with the same l allreduce their slice
    3. inside each host      allgather by shared memory: everybody gets all slices

A host sends 2 (H-1)/H S bytes, S being the bytes of the segment. Every tensor is sliced by itself,
so that the order of summation does not depend on what it is fused with. 16-bit types stay float32
until the end of the ring's first half, and are rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.common.collectives.base import Activity, Array, Group, Reduction
from hvdlite.common.collectives.chain import even_part
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.collectives.ring import RingBackend
from hvdlite.common.collectives.shm import ShmBackend
from hvdlite.common.reduce_op import ReduceOp
from hvdlite.common.transport.base import Transport


class HierarchicalBackend(RingBackend):
    """Allreduce in groups with several hosts, one of which has several members.

    What it does not offer is left to the ring it is built on.
    """

    name = "HIERARCHICAL"

    def __init__(self, transport: Transport, shm: ShmBackend) -> None:
        super().__init__(transport)
        self._shm = shm

    def supports(
        self, collective: str, dtype: np.dtype[Any], reduce_op: ReduceOp, group: Group
    ) -> bool:
        """Allreduce other than Adasum, where both floors of the hierarchy have something to do."""
        hosts = group.topology.hosts
        layered = len(hosts) > 1 and any(len(host) > 1 for host in hosts)
        return layered and collective == "allreduce" and reduce_op != ReduceOp.ADASUM

    def allreduce(
        self,
        group: Group,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        """See `Backend.allreduce`. Summed by local members first, then around the hosts."""
        if not inputs:
            return
        arithmetic = Arithmetic(inputs[0].dtype, reduction)
        local = _subgroup(group, group.topology.peers(group.index))
        slices = min(len(host) for host in group.topology.hosts)
        counts = [_slice_counts(array.size, slices, local.size) for array in inputs]
        mine = [sizes[local.index] for sizes in counts]
        partial = [np.empty(size, arithmetic.accumulator) for size in mine]
        result = [np.empty(size, arithmetic.output_dtype) for size in mine]
        with activity("HIERARCHICAL_REDUCESCATTER"):
            self._shm.reduce_parts(local, inputs, partial, counts, arithmetic.inner())
        if local.index < slices:
            across = _subgroup(group, tuple(host[local.index] for host in group.topology.hosts))
            with activity("HIERARCHICAL_RING"):
                self.allreduce_with(across, partial, result, arithmetic.outer())
        self._shm.allgather(local, result, outputs, counts, activity)


def _slice_counts(size: int, slices: int, members: int) -> list[int]:
    """How many of `size` elements each of `members` has; those beyond `slices` have none."""
    parts = [even_part(size, slices, part) for part in range(slices)]
    return [part.stop - part.start for part in parts] + [0] * (members - slices)


def _subgroup(group: Group, positions: tuple[int, ...]) -> Group:
    """The members of `group` at `positions`, of which this rank is one."""
    members = tuple(group.members[position] for position in positions)
    return Group(members, positions.index(group.index), group.topology.restrict(positions))
