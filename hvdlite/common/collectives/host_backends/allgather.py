"""Allgather over several hosts: each byte goes to each other host once.

The block of this host is gathered through shared memory, straight into the results. The members
with the same place pass on their slices of all blocks from host to host, and share what has come
with the ranks of their hosts. All of that goes on piece by piece, at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.base import Array, Reduction
from hvdlite.common.collectives.between_hosts.algorithms import Algorithm
from hvdlite.common.collectives.between_hosts.pipeline import Pipeline
from hvdlite.common.collectives.chained_view import Chain
from hvdlite.common.collectives.host_backends.host_slices import (
    Inside,
    Layers,
    blocks_of,
    one_hot,
    pieces_of,
)
from hvdlite.common.collectives.kernels import Arithmetic


class HostGather:
    """One allgather at one rank."""

    def __init__(
        self,
        inside: Inside,
        layers: Layers,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
    ) -> None:
        self._inside = inside
        self._layers = layers
        self._input = Chain(inputs)
        self._dtype = outputs[0].dtype
        self._blocks = blocks_of(outputs, counts, layers.hosts, layers.slices)
        self._elements = sum(block.chain.size for block in self._blocks)
        self._length = 0  # Elements of a piece.

    @property
    def nbytes(self) -> int:
        return self._elements * self._dtype.itemsize

    def plan(self, algorithm: Algorithm, piece_bytes: int) -> Pipeline:
        """Return what runs between the hosts, which drives what is done inside them."""
        layers = self._layers
        order, place = layers.ring_order, layers.local.index if layers.has_slice else 0
        slices = [block.slice_chain(place) for block in self._blocks]
        sources = [Chain([])] * len(slices)
        sources[layers.host] = slices[layers.host]
        self._length = algorithm.length(
            order, piece_bytes, self._dtype.itemsize, self._elements // layers.slices
        )
        return algorithm.plan(
            order,
            sources=sources,
            targets=slices,
            arithmetic=Arithmetic(self._dtype, Reduction(ReduceOp.SUM)),
            length=self._length,
            before=self._gather,
            after=self._share,
            fewest_pieces=pieces_of(self._blocks, self._length),
        )

    def _gather(self, piece: int) -> None:
        local, block = self._layers.local, self._blocks[self._layers.host]
        mine = block.members[local.index]
        given: list[Array] = []
        arrays, counts = [], []
        for slice_ in range(self._layers.slices):
            elements = block.piece(slice_, piece, self._length)
            own = elements.common(mine)
            given += self._input.views(own.start - mine.start, own.stop - mine.start)
            for owner, view in block.owned(elements):
                arrays.append(view)
                counts.append(one_hot(view.size, owner, local.size))
        self._inside.gather(given, arrays, counts)

    def _share(self, piece: int) -> None:
        """Share what has come of a piece with the ranks of this host, and get what they have."""
        local = self._layers.local
        if local.size == 1:
            return
        given: list[Array] = []
        arrays, counts = [], []
        for host, block in enumerate(self._blocks):
            if host == self._layers.host:
                continue
            for slice_ in range(self._layers.slices):
                for view in block.views(block.piece(slice_, piece, self._length)):
                    arrays.append(view)
                    counts.append(one_hot(view.size, slice_, local.size))
                    if slice_ == local.index:
                        given.append(view)
        self._inside.gather(given, arrays, counts)
