"""The compiled collectives of one host at one rank.

They compute what `shm.py` computes in Python: reductions in the order of the members, 16-bit floats
in float32, hence the same bits. Their memory lies behind the slots that Python uses. Members use
them when all of them have the same library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from hvdlite.common.collectives.base import Array, InPlace, Members
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.collectives.native.library import Library
from hvdlite.common.collectives.native.segment import (
    Chains,
    SegmentArguments,
    address,
    point,
    set_reduction,
)
from hvdlite.common.transport.base import Transport, connection_lost

SLOTS = 8  # of a rank, where the host has few ranks
PIECE_BYTES = 256 << 10
SMALL_BYTES = 32 << 10  # to add so much takes less time than to wait once more
# Results of so many bytes go past the caches, but for those of an allreduce, whose memory is there
# already, as its inputs were read.
STREAMED_BYTES = 8 << 20
# How often a wait for another rank looks whether it is gone, or the world is over: this is the time
# that the survivors of an elastic job lose. Waits are rare, as all ranks are ready when they begin.
CHECK_SECONDS = 0.01
# The first time where there are several hosts, and twice as much each further time: ranks of other
# hosts may wait for what this one has not sent yet.
FIRST_CHECK_SECONDS = 0.004
MOST_RANKS = 256  # kMaxMembers in chain.h
BOARD_BYTES = 32 << 10  # room for the board of so many, and for the row of an alltoall
ROW_START = BOARD_BYTES - MOST_RANKS * 8
MEMORY_BYTES = BOARD_BYTES + SLOTS * PIECE_BYTES  # of each rank

# The slots of all ranks of a host take no more than this, down to so many for each rank: what is on
# its way then stays in the last cache, with the tensors that it comes from and goes to.
HOST_SLOT_BYTES, LEAST_SLOTS = 8 << 20, 4

ALLREDUCE, REDUCESCATTER, ALLGATHER, ALLTOALL, BROADCAST = range(5)  # as in `hvdlite_run`
# How a rank stores into its own slots: as it measures, or always alike (`Stores` in slot_stores.h).
MEASURED, ALL_PLAIN, ALL_STREAMED = range(3)
_STORES_NUMBERS = 14  # SlotStores, in numbers of 8 bytes
_COUNTED = 2  # what it returns when the counts of an alltoall are known


class NativeShm:
    """The compiled collectives at one rank. They own a part of the memory that ranks share."""

    def __init__(
        self, transport: Transport, found: Library, start: int, stores: int = MEASURED
    ) -> None:
        self._transport = transport
        self._library = found
        self.identity = found.identity  # differs between libraries that cannot work together
        self._start = start  # of this part in the memory of every rank, in bytes
        one_host = len(transport.topology.hosts) == 1
        self._first_check = CHECK_SECONDS if one_host else FIRST_CHECK_SECONDS
        self._ranks = transport.topology.peers(transport.rank)
        self._number = {rank: number for number, rank in enumerate(self._ranks)}
        self._views: dict[int, Array] = {}  # keeps what `_memory` points to
        self._memory = np.zeros(len(self._ranks), np.uint64)
        self._base = np.zeros(len(self._ranks), np.uint64)
        # By the ranks of the members: what is the same in all calls, and what it points to.
        self._groups: dict[tuple[int, ...], tuple[SegmentArguments, Array, Array]] = {}
        self._stores = stores

    def allreduce(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        arithmetic: Arithmetic,
    ) -> None:
        """See `Backend.allreduce`. All members must have room for it in their memory already.

        The other methods need that as well.
        """
        if isinstance(inputs, InPlace):
            source = target = Chains(inputs.sizes, inputs.addresses)
        else:
            source = target = Chains.one(inputs)
            if any(given is not taken for given, taken in zip(inputs, outputs, strict=True)):
                target = Chains.one(outputs)
        arguments = self._arguments(members, ALLREDUCE, arithmetic.input_dtype.itemsize)
        set_reduction(arguments, arithmetic)
        arguments.result_itemsize = arithmetic.output_dtype.itemsize
        arguments.whole = sum(source.sizes) * arguments.itemsize <= SMALL_BYTES
        point(arguments, source, target)
        self._run(arguments)

    def reducescatter(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        arithmetic: Arithmetic,
    ) -> None:
        arguments = self._arguments(members, REDUCESCATTER, arithmetic.input_dtype.itemsize)
        set_reduction(arguments, arithmetic)
        arguments.result_itemsize = arithmetic.output_dtype.itemsize
        arguments.streamed = _streamed(outputs)
        source, target = Chains.of_members(inputs, counts), Chains.one(outputs)
        point(arguments, source, target)
        self._run(arguments)

    def allgather(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
    ) -> None:
        arguments = self._arguments(members, ALLGATHER, inputs[0].itemsize)
        arguments.streamed = _streamed(outputs)
        source, target = Chains.one(inputs), Chains.of_members(outputs, counts)
        point(arguments, source, target)
        self._run(arguments)

    def broadcast(self, members: Members, arrays: Sequence[Array], root: int) -> None:
        arguments = self._arguments(members, BROADCAST, arrays[0].itemsize)
        arguments.root = root
        arguments.streamed = _streamed(arrays)
        chains = Chains.one(arrays)
        point(arguments, chains, chains)
        self._run(arguments)

    def alltoall(
        self,
        members: Members,
        array: Array,
        send_counts: Sequence[int],
        allocate: Callable[[list[int]], Array],
    ) -> None:
        arguments = self._arguments(members, ALLTOALL, array.itemsize)
        counts = np.array(send_counts, np.int64)
        arguments.counts = address(counts)
        source = Chains.of_members([array], [send_counts])
        point(arguments, source, source)
        self._run(arguments)
        received = counts.tolist()
        output = allocate(received)
        arguments.streamed = _streamed([output])
        target = Chains.of_members([output], [received])
        point(arguments, source, target)
        self._run(arguments)

    def _run(self, arguments: SegmentArguments) -> None:
        gone = -1
        while self._library.run(ctypes.byref(arguments)) not in (0, _COUNTED):
            rank = self._ranks[arguments.missed]
            if gone == rank:
                raise connection_lost(rank)
            if self._transport.gone(rank):
                gone = rank  # it may have done its part before it went: look once more
            self._transport.while_waiting()
            arguments.timeout_ns = min(2 * arguments.timeout_ns, int(CHECK_SECONDS * 1e9))

    def _arguments(self, members: Members, collective: int, itemsize: int) -> SegmentArguments:
        known = self._groups.get(members.ranks)
        if known is None:
            known = self._groups[members.ranks] = self._group(members)
        group, _, stores = known
        arguments = SegmentArguments.from_buffer_copy(group)
        arguments.stores = address(stores) + collective * stores.strides[0]
        arguments.collective = collective
        arguments.itemsize = itemsize
        return arguments

    def _group(self, members: Members) -> tuple[SegmentArguments, Array, Array]:
        local = np.array([self._number[rank] for rank in members.ranks], np.int64)
        for rank in members.ranks:
            if rank not in self._views:
                view = self._transport.shared(rank, self._start + MEMORY_BYTES)[self._start :]
                self._views[rank] = view
                self._memory[self._number[rank]] = address(view)
        group = SegmentArguments(
            members=members.size,
            index=members.index,
            local_size=len(self._ranks),
            own=self._number[self._transport.rank],
            # The same for all groups on a host.
            slots=min(SLOTS, max(LEAST_SLOTS, HOST_SLOT_BYTES // (len(self._ranks) * PIECE_BYTES))),
            slot_bytes=PIECE_BYTES,
            slots_start=BOARD_BYTES,
            row_start=ROW_START,
            timeout_ns=int(self._first_check * 1e9),
            local=address(local),
            memory=address(self._memory),
            base=address(self._base),
        )
        stores = np.zeros((BROADCAST + 1, _STORES_NUMBERS), np.int64)
        stores[:, 0] = self._stores
        return group, local, stores


def _streamed(arrays: Sequence[Array]) -> bool:
    return sum(array.nbytes for array in arrays) >= STREAMED_BYTES
