"""The members of several hosts in two layers: those of each host, and one of each host in slices.

Between the hosts there are as many slices as the smallest host has members: the members with the
same place on their hosts exchange one slice of the data, so that several ranks of a host use its
link at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from hvdlite.common.collectives.base import Activity, Array, Members
from hvdlite.common.collectives.between_hosts.pipeline import RingOrder
from hvdlite.common.collectives.chained_view import Chain, even_part
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.collectives.shm import ShmBackend


@dataclass(frozen=True)
class Layers:
    """The members as a hierarchy sees them, at one of them."""

    local: Members  # the members on this host
    ring_order: (
        RingOrder  # one member of each host; that of the first slice if this member has none
    )
    slices: int
    hosts: tuple[tuple[int, ...], ...]  # positions of the members, by host

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, members: Members) -> Layers:
        hosts = members.topology.hosts
        positions = members.topology.peers(members.index)
        local_ranks = tuple(members.ranks[position] for position in positions)
        index = positions.index(members.index)
        local = Members(local_ranks, index, members.topology.restrict(positions))
        slices = min(len(host) for host in hosts)
        place = index if index < slices else 0
        ranks = tuple(members.ranks[host[place]] for host in hosts)
        ring_order = RingOrder(tuple(range(len(hosts))), ranks, hosts.index(positions))
        return cls(local, ring_order, slices, hosts)

    @property
    def has_slice(self) -> bool:
        """Whether this member takes part in what goes on between hosts."""
        return self.local.index < self.slices

    @property
    def host(self) -> int:
        return self.ring_order.index


class Inside:
    """The collectives of one host: shared memory, or nothing but copies for a single member."""

    def __init__(self, shm: ShmBackend | None, local: Members, activity: Activity) -> None:
        """Use `shm`, which a single member does not need."""
        self._local = local
        self._shm = None if local.size == 1 else shm
        self._activity = activity

    def gather(
        self, inputs: Sequence[Array], outputs: Sequence[Array], counts: Sequence[Sequence[int]]
    ) -> None:
        """See `Backend.allgather`. An input may be the memory of its place in the outputs."""
        if not outputs:
            return
        if self._shm is not None:
            given = inputs or [outputs[0][:0]]
            self._shm.allgather(self._local, given, outputs, counts, self._activity)
        else:
            Chain(inputs).copy_to(Chain(outputs))

    def reduce(
        self,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        arithmetic: Arithmetic,
    ) -> None:
        """Reduce and scatter, with any arithmetic; see `Backend.reducescatter`."""
        if not inputs:
            return
        if self._shm is not None:
            with self._activity("HIERARCHICAL_REDUCESCATTER"):
                self._shm.reduce_parts(self._local, inputs, outputs, counts, arithmetic)
            return
        target, start = Chain(outputs), 0
        for values in inputs:
            begin = start
            for view in target.views(begin, begin + values.size):
                arithmetic.reduce([values[start - begin :][: view.size]], view)
                start += view.size

    def broadcast(self, arrays: Sequence[Array], root: int) -> None:
        if self._shm is not None:
            self._shm.broadcast(self._local, arrays, root, self._activity)

    def exchange(
        self,
        array: Array,
        send_counts: Sequence[int],
        allocate: Callable[[list[int]], Array],
    ) -> None:
        if self._shm is not None:
            self._shm.alltoall(self._local, array, send_counts, allocate, self._activity)
        else:
            np.copyto(allocate(list(send_counts)), array[: send_counts[0]])


# -- the data of each host in slices and pieces, where each host has a block of its own

# The block of a host is what its members have, member by member. It is cut into slices, and a slice
# into pieces. The members of all hosts that have the same place exchange their slice, all of them
# at the same time, and piece by piece. With 2 hosts of 2 ranks, and slices of 3 pieces:
#
#     block of host 0   slice 0: 0 1 2   slice 1: 0 1 2
#     block of host 1   slice 0: 0 1 2   slice 1: 0 1 2
#
# "Piece 1" is the second piece of every slice of every block. Where the border of a slice lies
# changes no sum: its order depends on the host of which an element is.


class Range(NamedTuple):
    """The elements [start, stop)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return max(0, self.stop - self.start)

    def common(self, other: Range) -> Range:
        """Return what both have; its size is 0 if that is nothing."""
        return Range(max(self.start, other.start), min(self.stop, other.stop))


class HostBlock:
    """The parts of tensors that belong to the members of one host, in slices."""

    def __init__(
        self,
        arrays: Sequence[Array],
        ends: Sequence[Sequence[int]],
        host: Sequence[int],
        slices: int,
        by_member: bool = False,
    ) -> None:
        """Chain the parts of the members with the positions `host`, and cut them into slices.

        The part of a member in array t is [ends[t][member], ends[t][member + 1]). The slices are
        even, unless there are as many of them as members, and each is to have its own.
        """
        parts = [
            [array[end[member] : end[member + 1]] for array, end in zip(arrays, ends, strict=True)]
            for member in host
        ]
        self.chain = Chain([array for each in parts for array in each])
        sizes = (sum(array.size for array in each) for each in parts)
        borders = list(accumulate(sizes, initial=0))
        self.members = [Range(*pair) for pair in pairwise(borders)]
        self.whole = by_member and len(host) == slices  # Whether a member has one slice: its own.
        self.slices = self.members
        if not self.whole:
            even = (even_part(self.chain.size, slices, each) for each in range(slices))
            self.slices = [Range(part.start, part.stop) for part in even]

    def piece(self, slice_: int, piece: int, length: int) -> Range:
        """Return where a piece of `length` elements lies; the last one may be smaller, or empty."""
        start, stop = self.slices[slice_]
        start = min(start + piece * length, stop)
        return Range(start, min(start + length, stop))

    def views(self, elements: Range) -> Iterator[Array]:
        return self.chain.views(elements.start, elements.stop)

    def owned(self, elements: Range) -> Iterator[tuple[int, Array]]:
        """Yield views of these elements, each with the place of the member to which it belongs."""
        for place, part in enumerate(self.members):
            for view in self.views(part.common(elements)):
                yield place, view


class PieceWindow:
    """Part of a block of which only pieces under way are in memory; see `pipeline.Chunk`.

    `sums` and `results` have their memory by number, of `length` elements in each row.
    """

    def __init__(
        self,
        size: int,
        row: int,
        length: int,
        sums: Mapping[int, Array],
        results: Mapping[int, Array],
    ) -> None:
        self.size, self._row, self._length = size, row, length
        self._sums, self._results = sums, results

    def views(self, start: int, stop: int) -> Iterator[Array]:
        """Yield one piece of the partial sums."""
        if start < stop:
            number, offset = divmod(start, self._length)
            yield self._sums[number][self._row, offset : offset + stop - start]

    def unpack(self, start: int, buffer: Array) -> None:
        if buffer.size:
            number, offset = divmod(start, self._length)
            self._results[number][self._row, offset : offset + buffer.size] = buffer


def blocks_of(
    arrays: Sequence[Array],
    counts: Sequence[Sequence[int]],
    hosts: Sequence[Sequence[int]],
    slices: int,
    by_member: bool = False,
) -> list[HostBlock]:
    """Return the blocks of all hosts, of arrays of which members have ``counts[t][member]``."""
    ends = [list(accumulate(sizes, initial=0)) for sizes in counts]
    return [HostBlock(arrays, ends, host, slices, by_member) for host in hosts]


def pieces_of(blocks: Sequence[HostBlock], length: int) -> int:
    """Return how many pieces the largest slice has."""
    return max(-(-part.size // length) for block in blocks for part in block.slices)


def one_hot(size: int, place: int, members: int) -> list[int]:
    """Return how many elements each member has of what belongs to one of them."""
    counts = [0] * members
    counts[place] = size
    return counts
