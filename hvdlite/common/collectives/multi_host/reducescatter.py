"""Reducescatter over several hosts: summed inside each host first, then from host to host.

A piece of every block is reduced through shared memory: the member with place l gets slice l of the
sums over its host. The members with the same place reduce and scatter these, and a host ends with
its own block. Where its members have a slice each, that is their result; else the slices go to
their owners through shared memory. So each byte leaves a host once, whatever ranks it has.

16-bit floats are summed in float32 inside a host, and rounded once by each host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite.common.collectives.base import Array
from hvdlite.common.collectives.between_hosts.algorithms import Algorithm
from hvdlite.common.collectives.between_hosts.pipeline import Chunk, Pipeline
from hvdlite.common.collectives.chained_view import Chain
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.collectives.multi_host.host_slices import (
    Inside,
    Layers,
    PieceWindow,
    blocks_of,
    one_hot,
    pieces_of,
)


class HostScatter:
    """One reducescatter at one rank, of tensors that have the same algorithm."""

    def __init__(
        self,
        inside: Inside,
        layers: Layers,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        arithmetic: Arithmetic,
    ) -> None:
        self._inside = inside
        self._layers = layers
        self._output = Chain(outputs)
        self._arithmetic = arithmetic
        self._blocks = blocks_of(inputs, counts, layers.hosts, layers.slices, by_member=True)
        self._elements = sum(block.chain.size for block in self._blocks)
        self._length = 0  # Elements of a piece.
        self._sums: dict[int, Array] = {}  # By piece: a row for each block.
        self._free: list[Array] = []
        self._results: dict[int, Array] = {}  # By piece: a row for what goes to its owners.

    def plan(self, algorithm: Algorithm, piece_bytes: int) -> Pipeline:
        """Return what runs between the hosts, which drives what is done inside them."""
        layers, order = self._layers, self._layers.ring_order
        place = layers.local.index if layers.has_slice else 0
        itemsize = self._arithmetic.output_dtype.itemsize
        length = self._length = algorithm.length(
            order, piece_bytes, itemsize, self._elements // layers.slices
        )
        sizes = [block.slices[place].size for block in self._blocks]
        targets: list[Chunk] = [Chain([])] * len(sizes)
        targets[layers.host] = self._output
        if not self._blocks[layers.host].whole:
            targets[layers.host] = PieceWindow(
                sizes[layers.host], 0, length, self._results, self._results
            )
        return algorithm.plan(
            order,
            sources=[
                PieceWindow(size, row, length, self._sums, self._sums)
                for row, size in enumerate(sizes)
            ],
            targets=targets,
            arithmetic=self._arithmetic.outer(),
            length=length,
            before=self._reduce,
            after=self._finish,
            fewest_pieces=pieces_of(self._blocks, length),
        )

    def _reduce(self, piece: int) -> None:
        local, rows = self._layers.local, []
        given, counts = [], []
        if self._layers.has_slice:
            shape = len(self._blocks), self._length
            memory = (
                self._free.pop() if self._free else np.empty(shape, self._arithmetic.accumulator)
            )
            self._sums[piece] = memory
        for host, block in enumerate(self._blocks):
            for slice_ in range(self._layers.slices):
                elements = block.piece(slice_, piece, self._length)
                if slice_ == local.index:
                    rows.append(memory[host, : elements.size])
                for view in block.views(elements):
                    given.append(view)
                    counts.append(one_hot(view.size, slice_, local.size))
        if not rows:
            rows.append(np.empty(0, self._arithmetic.accumulator))
        if not self._blocks[self._layers.host].whole:
            self._results[piece] = np.empty((1, self._length), self._arithmetic.output_dtype)
        self._inside.reduce(given, rows, counts, self._arithmetic.inner())

    def _finish(self, piece: int) -> None:
        if self._layers.has_slice:
            self._free.append(self._sums.pop(piece))
        block = self._blocks[self._layers.host]
        if block.whole:
            return
        local = self._layers.local
        ranges = [block.piece(slice_, piece, self._length) for slice_ in range(self._layers.slices)]
        sent = [0] * local.size
        if self._layers.has_slice:
            sent = [ranges[local.index].common(owned).size for owned in block.members]
        received: list[Array] = []

        def allocate(counts: list[int]) -> Array:
            received.append(np.empty(sum(counts), self._arithmetic.output_dtype))
            return received[0]

        self._inside.exchange(self._results.pop(piece)[0, : sum(sent)], sent, allocate)
        mine, start = block.members[local.index], 0
        for elements in ranges:
            own = elements.common(mine)
            if own.size:
                self._output.unpack(own.start - mine.start, received[0][start : start + own.size])
                start += own.size
