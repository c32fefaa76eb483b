"""The data of each host in slices and pieces, where each host has a block of its own.

The block of a host is what its members have, member by member. It is cut into slices, and a slice
into pieces. The members of all hosts that have the same place exchange their slice, all of them at
the same time, and piece by piece. With 2 hosts of 2 ranks, and slices of 3 pieces:

    block of host 0   slice 0: 0 1 2   slice 1: 0 1 2
    block of host 1   slice 0: 0 1 2   slice 1: 0 1 2

"Piece 1" is the second piece of every slice of every block. Where the border of a slice lies
changes no sum: its order depends on the host of which an element is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from hvdlite.common.collectives.base import Array
from hvdlite.common.collectives.chained_view import Chain, even_part


class Range(NamedTuple):
    """The elements [start, stop)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
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
        """Yield views of these elements, in order."""
        return self.chain.views(elements.start, elements.stop)

    def owned(self, elements: Range) -> Iterator[tuple[int, Array]]:
        """Yield views of these elements, each with the place of the member to which it belongs."""
        for place, part in enumerate(self.members):
            for view in self.views(part.common(elements)):
                yield place, view

    def slice_chain(self, slice_: int) -> Chain:
        """Return a slice."""
        return Chain(list(self.views(self.slices[slice_])))


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
