"""Collectives in a ring: every member sends to the next one only.

The allreduce is that of Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
of workstations", Journal of Parallel and Distributed Computing 69 (2009).

Allreduce of S bytes among 3 members, cut into the chunks 0, 1, 2. In step s member i sends chunk
(i - s) mod 3 and receives chunk (i - s - 1) mod 3. "+c" is a partial sum of chunk c that is added
to, "=c" a finished one that is copied:

    step                member 0            member 1            member 2
    0  reduce-scatter   sends 0, gets +2    sends 1, gets +0    sends 2, gets +1
    1  reduce-scatter   sends 2, gets +1    sends 0, gets +2    sends 1, gets +0
    2  allgather        sends 1, gets =0    sends 2, gets =1    sends 0, gets =2
    3  allgather        sends 0, gets =2    sends 1, gets =0    sends 2, gets =1

After step 1 member i owns chunk (i + 1) mod 3. Each member sends 4 chunks: 2 (N-1)/N S bytes, the
least that any algorithm sends. 16-bit types are sent as such; each member adds in float32, and
rounds.

The chunk of an element depends on its place in its own tensor alone, and so does the order in which
it is summed: fusion with other tensors does not change a bit of the result. Members are ordered by
host, so that each host receives from one other host, and sends to one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.base import Activity, Array, Members, Reduction
from hvdlite.common.collectives.between_hosts.algorithms import RING, Algorithm
from hvdlite.common.collectives.between_hosts.costs import PIECE_BYTES
from hvdlite.common.collectives.between_hosts.pipeline import Pipeline, RingOrder, RingPlan
from hvdlite.common.collectives.chained_view import Chain, even_chain, member_chain
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.transport.base import Pending, Transport


class RingBackend:
    """All collectives among any ranks, over point-to-point messages."""

    name = "RING"

    def __init__(self, transport: Transport, piece_bytes: int = PIECE_BYTES) -> None:
        self._transport = transport
        self.piece_bytes = piece_bytes

    def supports(
        self, collective: str, dtype: np.dtype[Any], reduce_op: ReduceOp, members: Members
    ) -> bool:
        """Support everything but Adasum, among more than one member."""
        return members.size > 1 and reduce_op != ReduceOp.ADASUM

    def allreduce(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        if inputs:
            arithmetic = Arithmetic(inputs[0].dtype, reduction)
            with activity("RING_ALLREDUCE"):
                self.allreduce_by(RING, RingOrder.of(members), inputs, outputs, arithmetic)

    def allreduce_by(
        self,
        algorithm: Algorithm,
        order: RingOrder,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        arithmetic: Arithmetic,
    ) -> None:
        """Reduce among the members of `order`, with any arithmetic."""
        blocks, elements = algorithm.blocks(order), sum(array.size for array in inputs)
        plan = algorithm.plan(
            order,
            sources=[even_chain(inputs, blocks, block) for block in range(blocks)],
            targets=[even_chain(outputs, blocks, block) for block in range(blocks)],
            arithmetic=arithmetic,
            length=algorithm.length(
                order, self.piece_bytes, arithmetic.output_dtype.itemsize, elements
            ),
        )
        self._run(plan)

    def reducescatter(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        """See `Backend.reducescatter`. Shifted, so that a member ends with its own chunk."""
        if not inputs:
            return
        ring_order, arithmetic = RingOrder.of(members), Arithmetic(inputs[0].dtype, reduction)
        sources = [member_chain(inputs, counts, member) for member in ring_order.order]
        targets = [Chain([])] * members.size
        targets[ring_order.index] = Chain(outputs)
        plan = RingPlan(
            ring_order=ring_order, sources=sources, targets=targets, arithmetic=arithmetic,
            reduce_steps=members.size - 1, gather_steps=0, shift=1, length=self._length(arithmetic),
        )  # fmt: skip
        with activity("RING_REDUCESCATTER"):
            self._run(plan)

    def allgather(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        activity: Activity,
    ) -> None:
        if not inputs:
            return
        ring_order = RingOrder.of(members)
        copied = Arithmetic(inputs[0].dtype, Reduction(ReduceOp.SUM))
        targets = [member_chain(outputs, counts, member) for member in ring_order.order]
        sources = [Chain([])] * members.size
        sources[ring_order.index] = Chain(inputs)
        with activity("RING_ALLGATHER"):
            sources[ring_order.index].copy_to(targets[ring_order.index])
            plan = RingPlan(
                ring_order=ring_order, sources=sources, targets=targets, arithmetic=copied,
                reduce_steps=0, gather_steps=members.size - 1, length=self._length(copied),
            )  # fmt: skip
            self._run(plan)

    def _length(self, arithmetic: Arithmetic) -> int:
        """Return how many elements a piece has."""
        return max(1, self.piece_bytes // arithmetic.output_dtype.itemsize)

    def _run(self, plan: Pipeline) -> None:
        if any(plan.sizes):
            plan.run(self._transport)

    def broadcast(
        self, members: Members, arrays: Sequence[Array], root: int, activity: Activity
    ) -> None:
        """See `Backend.broadcast`. Pieces go from member to member, and follow each other."""
        ring_order = RingOrder.of(members)
        distance = (ring_order.index - ring_order.order.index(root)) % members.size
        pieces = [piece for array in arrays for piece in self._pieces(array)]
        sends: deque[Pending] = deque()
        with activity("RING_BROADCAST"):
            receives = deque(
                self._transport.irecv(ring_order.rank(-1), piece) for piece in pieces if distance
            )
            for piece in pieces:
                if distance:
                    self._transport.wait([receives.popleft()])
                if distance < members.size - 1:
                    sends.append(self._transport.isend(ring_order.rank(1), piece))
            self._transport.wait(sends)

    def _pieces(self, array: Array) -> list[Array]:
        length = max(1, self.piece_bytes // array.itemsize)
        return [array[start : start + length] for start in range(0, array.size, length)]

    def alltoall(
        self,
        members: Members,
        array: Array,
        send_counts: Sequence[int],
        allocate: Callable[[list[int]], Array],
        activity: Activity,
    ) -> None:
        """See `Backend.alltoall`. Pairwise: in step k to the k-th next, from the k-th previous."""
        with activity("RING_ALLTOALL"):
            counts = np.zeros((members.size, 1), np.int64)
            ones = np.ones(members.size, np.int64).tolist()
            own_counts = np.asarray(send_counts, np.int64)
            self._exchange(members, own_counts, ones, counts.reshape(-1), ones)
            received = [int(count) for count in counts[:, 0]]
            self._exchange(members, array, send_counts, allocate(received), received)

    def _exchange(
        self,
        members: Members,
        source: Array,
        send_counts: Sequence[int],
        target: Array,
        receive_counts: Sequence[int],
    ) -> None:
        ring_order, size = RingOrder.of(members), members.size
        ends = np.cumsum([0, *send_counts]), np.cumsum([0, *receive_counts])
        parts = [source[ends[0][i] : ends[0][i + 1]] for i in range(size)]
        slots = [target[ends[1][i] : ends[1][i + 1]] for i in range(size)]
        np.copyto(slots[members.index], parts[members.index])
        for step in range(1, size):
            to, by = ((ring_order.index + way * step) % size for way in (1, -1))
            receive = self._transport.irecv(ring_order.ranks[by], slots[ring_order.order[by]])
            send = self._transport.isend(ring_order.ranks[to], parts[ring_order.order[to]])
            self._transport.wait([receive, send])
