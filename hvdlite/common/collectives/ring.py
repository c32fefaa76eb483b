"""Collectives in a ring: every member sends to the next one only.

Allreduce of S bytes among 3 members, cut into the chunks 0, 1, 2. In step s member i sends chunk
(i - s) mod 3 and receives chunk (i - s - 1) mod 3. "+c" is a partial sum of chunk c that is added
to, "=c" a finished one that is copied:

    step                member 0            member 1            member 2
    0  reduce-scatter   sends 0, gets +2    sends 1, gets +0    sends 2, gets +1
    1  reduce-scatter   sends 2, gets +1    sends 0, gets +2    sends 1, gets +0
    2  allgather        sends 1, gets =0    sends 2, gets =1    sends 0, gets =2
    3  allgather        sends 0, gets =2    sends 1, gets =0    sends 2, gets =1

After step 1 member i owns chunk (i + 1) mod 3. Each member sends 4 chunks: 2 (N-1)/N S bytes, which
no algorithm undercuts. 16-bit types travel as such; each member adds in float32, and rounds once.

Where an element goes depends on its place in its own tensor alone, and so does the order in which
it is summed: fusing it with other tensors does not change a bit of the result. Members are ordered
by host, so each host's border is crossed once in each direction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.base import Activity, Array, Group, Reduction
from hvdlite.common.collectives.chained_view import Chain, even_chain, member_chain
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.collectives.ring_pipeline import Circle, Plan, Trip
from hvdlite.common.transport.base import Pending, Transport

PIECE_BYTES = 252 << 10


class RingBackend:
    """All collectives among any ranks, over point-to-point messages."""

    name = "RING"

    def __init__(self, transport: Transport, piece_bytes: int = PIECE_BYTES) -> None:
        self._transport = transport
        self.piece_bytes = piece_bytes

    def supports(
        self, collective: str, dtype: np.dtype[Any], reduce_op: ReduceOp, group: Group
    ) -> bool:
        """Everything but Adasum, in groups of more than one member."""
        return group.size > 1 and reduce_op != ReduceOp.ADASUM

    def allreduce(
        self,
        group: Group,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        """See `Backend.allreduce`."""
        if inputs:
            arithmetic = Arithmetic(inputs[0].dtype, reduction)
            with activity("RING_ALLREDUCE"):
                self.allreduce_around(Circle.of(group), inputs, outputs, arithmetic)

    def allreduce_around(
        self,
        circle: Circle,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        arithmetic: Arithmetic,
    ) -> None:
        """An allreduce among the members of `circle`, with any arithmetic."""
        size = len(circle.order)
        sources = [even_chain(inputs, size, chunk) for chunk in range(size)]
        targets = [even_chain(outputs, size, chunk) for chunk in range(size)]
        steps = size - 1
        self._run(Plan(circle, sources, targets, arithmetic, steps, steps, 0, self.piece_bytes))

    def reducescatter(
        self,
        group: Group,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        """See `Backend.reducescatter`. Shifted, so that a member ends with its own chunk."""
        if not inputs:
            return
        circle, arithmetic = Circle.of(group), Arithmetic(inputs[0].dtype, reduction)
        sources = [member_chain(inputs, counts, member) for member in circle.order]
        targets = [Chain([])] * group.size
        targets[circle.index] = Chain(outputs)
        plan = Plan(circle, sources, targets, arithmetic, group.size - 1, 0, 1, self.piece_bytes)
        with activity("RING_REDUCESCATTER"):
            self._run(plan)

    def allgather(
        self,
        group: Group,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        activity: Activity,
    ) -> None:
        """See `Backend.allgather`."""
        if not inputs:
            return
        circle = Circle.of(group)
        copied = Arithmetic(inputs[0].dtype, Reduction(ReduceOp.SUM))
        targets = [member_chain(outputs, counts, member) for member in circle.order]
        sources = [Chain([])] * group.size
        sources[circle.index] = Chain(inputs)
        with activity("RING_ALLGATHER"):
            sources[circle.index].copy_to(targets[circle.index])
            self._run(
                Plan(circle, sources, targets, copied, 0, group.size - 1, 0, self.piece_bytes)
            )

    def _run(self, plan: Plan) -> None:
        if any(plan.sizes):
            Trip(self._transport, plan).run()

    def broadcast(self, group: Group, array: Array, root: int, activity: Activity) -> None:
        """See `Backend.broadcast`. Pieces go from member to member, and follow each other."""
        circle = Circle.of(group)
        distance = (circle.index - circle.order.index(root)) % group.size
        length = max(1, self.piece_bytes // array.itemsize)
        pieces = [array[start : start + length] for start in range(0, array.size, length)]
        sends: deque[Pending] = deque()
        with activity("RING_BROADCAST"):
            receives = deque(
                self._transport.irecv(circle.rank(-1), piece) for piece in pieces if distance
            )
            for piece in pieces:
                if distance:
                    self._transport.wait([receives.popleft()])
                if distance < group.size - 1:
                    sends.append(self._transport.isend(circle.rank(1), piece))
            self._transport.wait(sends)

    def alltoall(
        self,
        group: Group,
        array: Array,
        send_counts: Sequence[int],
        allocate: Callable[[list[int]], Array],
        activity: Activity,
    ) -> None:
        """See `Backend.alltoall`. Pairwise: in step k to the k-th next, from the k-th previous."""
        with activity("RING_ALLTOALL"):
            counts = np.zeros((group.size, 1), np.int64)
            ones = np.ones(group.size, np.int64).tolist()
            own_counts = np.asarray(send_counts, np.int64)
            self._exchange(group, own_counts, ones, counts.reshape(-1), ones)
            received = [int(count) for count in counts[:, 0]]
            self._exchange(group, array, send_counts, allocate(received), received)

    def _exchange(
        self,
        group: Group,
        source: Array,
        send_counts: Sequence[int],
        target: Array,
        receive_counts: Sequence[int],
    ) -> None:
        circle, size = Circle.of(group), group.size
        ends = np.cumsum([0, *send_counts]), np.cumsum([0, *receive_counts])
        parts = [source[ends[0][i] : ends[0][i + 1]] for i in range(size)]
        slots = [target[ends[1][i] : ends[1][i + 1]] for i in range(size)]
        np.copyto(slots[group.index], parts[group.index])
        for step in range(1, size):
            to, by = ((circle.index + way * step) % size for way in (1, -1))
            receive = self._transport.irecv(circle.ranks[by], slots[circle.order[by]])
            send = self._transport.isend(circle.ranks[to], parts[circle.order[to]])
            self._transport.wait([receive, send])
