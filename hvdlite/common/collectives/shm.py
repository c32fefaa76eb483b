"""Collectives through memory that all members see: one host.

Every rank owns SLOTS slots of shared memory, and data goes through them piece by piece, so the
memory is fixed and stays in the cache whatever the tensors measure. An allreduce in three stages,
with m members (a step is what happens between two signals):

    step      t                 t+1                          t+2
    stage 0   pack piece t      pack piece t+1               pack piece t+2
    stage 1                     my m-th of piece t, added    ... of piece t+1
                                from all slots in the order
                                of the members, into mine
    stage 2                                                  unpack piece t, each m-th
                                                             from its owner's slot

A small allreduce takes two stages, with one signal less to wait for: every rank adds all of it.

A rank waits for the signal of step t from all peers between the stages 0 and 1 of step t+1. So
when it packs piece t+4 into the slot of piece t, its peers have ended step t+2, which unpacked
piece t: four slots are enough. The signals of the last step are left unread until the next
collective begins, which must not touch the slots earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.base import Activity, Array, InPlace, Members, Reduction
from hvdlite.common.collectives.chained_view import Chain, even_part, member_chain
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.collectives.native.collectives import (
    MEASURED,
    MEMORY_BYTES,
    MOST_RANKS,
    NativeShm,
)
from hvdlite.common.collectives.native.library import Library
from hvdlite.common.collectives.native.segment import codes
from hvdlite.common.transport.base import Transport

SLOTS = 4
PIECE_BYTES = 256 << 10
SMALL_BYTES = 32 << 10  # Every rank adds all of it: that takes less time than another signal.

Stage = Callable[[int], None]  # Does its part of the piece with this number.


class ShmBackend:
    """All collectives among ranks of one host.

    A transport has only one ShmBackend, which owns the transport's shared memory and signals.
    """

    name = "SHM"

    def __init__(
        self,
        transport: Transport,
        library: Library | None = None,
        piece_bytes: int = PIECE_BYTES,
        stores: int = MEASURED,
    ) -> None:
        self._transport = transport
        self._piece_bytes = piece_bytes
        self._native: NativeShm | None = None
        if library is not None and len(transport.topology.peers(transport.rank)) <= MOST_RANKS:
            self._native = NativeShm(transport, library, SLOTS * piece_bytes, stores)
        # Whether all members have the same library, by their ranks; they ask each other once.
        self._agreed: dict[tuple[int, ...], bool] = {}
        self._memory: dict[int, Array] = {}
        # The peers whose signal of the last step is unread. The next collective reads it first.
        self._unread: tuple[int, ...] = ()

    def supports(
        self, collective: str, dtype: np.dtype[Any], reduce_op: ReduceOp, members: Members
    ) -> bool:
        """Support everything but Adasum, if all members are on one host."""
        return len(members.topology.hosts) == 1 and reduce_op != ReduceOp.ADASUM

    def allreduce(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        """See `Backend.allreduce`. Summed in the order of the members."""
        if not inputs:
            return
        dtype = inputs.dtype if isinstance(inputs, InPlace) else inputs[0].dtype
        arithmetic = Arithmetic(dtype, reduction)
        native = self._compiled(members, arithmetic)
        if native is not None:
            with activity("SHM_ALLREDUCE"):
                native.allreduce(members, inputs, outputs, arithmetic)
            return
        source, target = Chain(inputs), Chain(outputs)
        if not source.size:
            return
        length = self._piece_bytes // dtype.itemsize

        def slots(piece: int) -> list[Array]:
            size = min(length, source.size - piece * length)
            return [self._slot(rank, piece, dtype)[:size] for rank in members.ranks]

        def pack(piece: int) -> None:
            size = min(length, source.size - piece * length)
            own = self._slot(self._transport.rank, piece, dtype)
            source.pack(piece * length, own[:size])

        def reduce_whole(piece: int) -> None:
            total = np.empty(source.size, dtype)
            arithmetic.reduce(slots(piece), total)
            target.unpack(0, total)

        def reduce(piece: int) -> None:
            every = slots(piece)
            mine = even_part(every[0].size, members.size, members.index)
            arithmetic.reduce([slot[mine] for slot in every], every[members.index][mine])

        def unpack(piece: int) -> None:
            for owner, slot in enumerate(slots(piece)):
                part = even_part(slot.size, members.size, owner)
                target.unpack(piece * length + part.start, slot[part])

        with activity("SHM_ALLREDUCE"):
            if source.size <= min(length, SMALL_BYTES // dtype.itemsize):
                self._run(self._peers(members), 1, pack, reduce_whole)
            else:
                self._run(self._peers(members), -(-source.size // length), pack, reduce, unpack)

    def _compiled(self, members: Members, arithmetic: Arithmetic | None = None) -> NativeShm | None:
        """Return the compiled collectives if all members have the same; they ask each other once.

        None as well for an arithmetic that is not compiled.
        """
        native = self._native
        if members.size == 1:
            return None
        agreed = self._agreed.get(members.ranks)
        if agreed is None:
            identity = np.array([native.identity if native else 0], np.uint64)
            identities = np.empty(members.size, np.uint64)
            self._gather_in_python(members, [identity], [identities], [[1] * members.size])
            agreed = bool((identities == identity).all())
            self._agreed[members.ranks] = agreed
        if not agreed or native is None or (arithmetic is not None and codes(arithmetic) is None):
            return None
        self._begin()  # a signal that nobody takes would hide that a peer is gone
        return native

    def reducescatter(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        """See `Backend.reducescatter`. Summed in the order of the members."""
        if inputs:
            arithmetic = Arithmetic(inputs[0].dtype, reduction)
            with activity("SHM_REDUCESCATTER"):
                self.reduce_parts(members, inputs, outputs, counts, arithmetic)

    def reduce_parts(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        arithmetic: Arithmetic,
    ) -> None:
        """Reduce and scatter with any arithmetic. A slot holds one part for each member."""
        native = self._compiled(members, arithmetic)
        if native is not None:
            native.reducescatter(members, inputs, outputs, counts, arithmetic)
            return
        dtype = arithmetic.input_dtype
        sources = [member_chain(inputs, counts, member) for member in range(members.size)]
        target = Chain(outputs)
        length = self._piece_bytes // dtype.itemsize // members.size

        def part(rank: int, piece: int, member: int) -> Array:
            size = max(0, min(length, sources[member].size - piece * length))
            return self._slot(rank, piece, dtype)[member * length :][:size]

        def pack(piece: int) -> None:
            for member, source in enumerate(sources):
                source.pack(piece * length, part(self._transport.rank, piece, member))

        def reduce(piece: int) -> None:
            start = piece * length
            parts = [part(rank, piece, members.index) for rank in members.ranks]
            for view in target.views(start, start + parts[0].size):
                arithmetic.reduce([each[: view.size] for each in parts], view)
                parts = [each[view.size :] for each in parts]

        pieces = max(-(-source.size // length) for source in sources)
        self._run(self._peers(members), pieces, pack, reduce)

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
        with activity("SHM_ALLGATHER"):
            native = self._compiled(members)
            if native is not None:
                native.allgather(members, inputs, outputs, counts)
            else:
                self._gather_in_python(members, inputs, outputs, counts)

    def _gather_in_python(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
    ) -> None:
        dtype = inputs[0].dtype
        source = Chain(inputs)
        targets = [member_chain(outputs, counts, member) for member in range(members.size)]
        length = self._piece_bytes // dtype.itemsize

        def slot(member: int, piece: int) -> Array:
            size = max(0, min(length, targets[member].size - piece * length))
            return self._slot(members.ranks[member], piece, dtype)[:size]

        def pack(piece: int) -> None:
            source.pack(piece * length, slot(members.index, piece))

        def unpack(piece: int) -> None:
            for member, target in enumerate(targets):
                target.unpack(piece * length, slot(member, piece))

        pieces = max(-(-target.size // length) for target in targets)
        self._run(self._peers(members), pieces, pack, unpack)

    def broadcast(
        self, members: Members, arrays: Sequence[Array], root: int, activity: Activity
    ) -> None:
        if not arrays:
            return
        with activity("SHM_BROADCAST"):
            native = self._compiled(members)
            if native is not None:
                native.broadcast(members, arrays, root)
                return
            chain, dtype = Chain(arrays), arrays[0].dtype
            length = self._piece_bytes // dtype.itemsize
            owner = members.ranks[root]

            def slot(piece: int) -> Array:
                return self._slot(owner, piece, dtype)[: chain.size - piece * length]

            def pack(piece: int) -> None:
                if members.index == root:
                    chain.pack(piece * length, slot(piece))

            def unpack(piece: int) -> None:
                if members.index != root:
                    chain.unpack(piece * length, slot(piece))

            # The others signal to the root alone.
            peers = self._peers(members) if members.index == root else (owner,)
            self._run(peers, -(-chain.size // length), pack, unpack)

    def alltoall(
        self,
        members: Members,
        array: Array,
        send_counts: Sequence[int],
        allocate: Callable[[list[int]], Array],
        activity: Activity,
    ) -> None:
        with activity("SHM_ALLTOALL"):
            native = self._compiled(members)
            if native is not None:
                native.alltoall(members, array, send_counts, allocate)
                return
            # A slot holds one part for each member.
            matrix = self._exchange_counts(members, send_counts)
            received = [int(count) for count in matrix[:, members.index]]
            output = allocate(received)
            sources = [member_chain([array], [send_counts], each) for each in range(members.size)]
            targets = [member_chain([output], [received], each) for each in range(members.size)]
            length = self._piece_bytes // array.itemsize // members.size

            def part(sender: int, receiver: int, piece: int) -> Array:
                size = max(0, min(length, int(matrix[sender, receiver]) - piece * length))
                slot = self._slot(members.ranks[sender], piece, array.dtype)
                return slot[receiver * length :][:size]

            def pack(piece: int) -> None:
                for receiver, source in enumerate(sources):
                    source.pack(piece * length, part(members.index, receiver, piece))

            def unpack(piece: int) -> None:
                for sender, target in enumerate(targets):
                    target.unpack(piece * length, part(sender, members.index, piece))

            pieces = -(-int(matrix.max()) // length)
            self._run(self._peers(members), pieces, pack, unpack)

    def _exchange_counts(self, members: Members, send_counts: Sequence[int]) -> Array:
        """Return how many elements are sent, as a matrix of senders by receivers."""
        dtype = np.dtype(np.int64)
        matrix = np.empty((members.size, members.size), dtype)

        def pack(piece: int) -> None:
            self._slot(self._transport.rank, piece, dtype)[: members.size] = send_counts

        def unpack(piece: int) -> None:
            for row, rank in zip(matrix, members.ranks, strict=True):
                np.copyto(row, self._slot(rank, piece, dtype)[: members.size])

        self._run(self._peers(members), 1, pack, unpack)
        return matrix

    # -- the pipeline

    def _peers(self, members: Members) -> tuple[int, ...]:
        return tuple(rank for rank in members.ranks if rank != self._transport.rank)

    def _run(self, peers: tuple[int, ...], pieces: int, *stages: Stage) -> None:
        """Run the stages: stage s does piece j in step j + s, as in the table of the module."""
        if not pieces:
            return
        self._begin()
        for step in range(pieces + len(stages) - 1):
            for depth, stage in enumerate(stages):
                if depth == 1 and step > 0:
                    self._await(peers)
                if 0 <= step - depth < pieces:
                    stage(step - depth)
            self._transport.signal(peers)
        self._unread = peers

    def _begin(self) -> None:
        """Wait until no peer reads the slots of this rank any more, and make sure they exist."""
        self._await(self._unread)
        self._unread = ()
        self._slot(self._transport.rank, 0, np.dtype(np.uint8))

    def _await(self, peers: Sequence[int]) -> None:
        for rank in peers:
            self._transport.await_signal(rank)

    def _slot(self, rank: int, piece: int, dtype: np.dtype[Any]) -> Array:
        """Return the slot of `rank` that `piece` goes through."""
        memory = self._memory.get(rank)
        if memory is None:
            memory = self._transport.shared(rank, SLOTS * self._piece_bytes + MEMORY_BYTES)
            self._memory[rank] = memory
        start = piece % SLOTS * self._piece_bytes
        return memory[start : start + self._piece_bytes].view(dtype)
