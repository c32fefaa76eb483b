"""Allreduce over several hosts: shared memory inside a host, an algorithm between the hosts.

With L slices, L being the number of members on the smallest host, and H hosts:

    1. inside each host      reduce-scatter by shared memory: local member l < L gets slice l
    2. across the hosts      L allreduces at a time: members with the same l reduce their slice
    3. inside each host      allgather by shared memory: everybody gets all slices

What runs across the hosts is one of `algorithms`, chosen tensor by tensor: a segment is reduced in
one part for each algorithm that its tensors need.

A large part is cut into blocks, and all three phases go on at once. Each slice has chunks, as many
as the algorithm wants; a block is some pieces of every chunk of every slice. The schedule of the
pieces is the same for all L slices. It says when a block is needed, which is then reduce-scattered,
and when it has come back, which is then gathered. So the link between hosts is busy while the host
adds and copies.

In rings a host sends 2 (H-1)/H S bytes, S being the bytes of the segment. Every tensor is sliced by
itself, so that the order of summation does not depend on what it is fused with. 16-bit types are
summed in float32 inside a host, and rounded once for each host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.base import Activity, Array, Members, Reduction
from hvdlite.common.collectives.between_hosts.algorithms import Algorithm
from hvdlite.common.collectives.between_hosts.pipeline import Pipeline
from hvdlite.common.collectives.chained_view import Chain, even_chain, even_part
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.collectives.multi_host.backends import HostsBackend
from hvdlite.common.collectives.multi_host.host_slices import Layers, PieceWindow
from hvdlite.common.collectives.shm import ShmBackend

BLOCK_PIECES = 2


class HierarchicalBackend(HostsBackend):
    """All collectives among several hosts, one of which has several members."""

    name = "HIERARCHICAL"

    _shm: ShmBackend

    def supports(
        self, collective: str, dtype: np.dtype[Any], reduce_op: ReduceOp, members: Members
    ) -> bool:
        """Support everything but Adasum, among several hosts of which one has several members."""
        hosts = members.topology.hosts
        layered = len(hosts) > 1 and any(len(host) > 1 for host in hosts)
        return layered and reduce_op != ReduceOp.ADASUM

    def allreduce(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        """See `Backend.allreduce`. Summed by local members first, then across the hosts."""
        if not inputs:
            return
        layers = Layers.of(members)
        arithmetic = Arithmetic(inputs[0].dtype, reduction)
        hosts = len(layers.ring_order.order)
        for algorithm, numbers in self._choice.groups(hosts, layers.slices, inputs).items():
            sources = [inputs[number] for number in numbers]
            targets = [outputs[number] for number in numbers]
            blocks = algorithm.blocks(layers.ring_order)
            block_bytes = BLOCK_PIECES * self.piece_bytes * layers.slices * blocks
            if sum(array.nbytes for array in sources) <= block_bytes:
                self._at_once(algorithm, layers, sources, targets, arithmetic, activity)
                continue
            plan = _Pipeline(
                self._shm, algorithm, layers, sources, targets, arithmetic, self.piece_bytes,
                activity,
            ).plan()  # fmt: skip
            with activity(f"HIERARCHICAL_{algorithm.phase}"):
                self._run_layers(layers, plan)

    def _at_once(
        self,
        algorithm: Algorithm,
        layers: Layers,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        arithmetic: Arithmetic,
        activity: Activity,
    ) -> None:
        """Run one phase after the other: a small segment does not fill a pipeline."""
        local = layers.local
        counts = []
        for array in inputs:
            parts = [even_part(array.size, layers.slices, part) for part in range(layers.slices)]
            none = [0] * (local.size - layers.slices)  # Of the members beyond the slices.
            counts.append([part.stop - part.start for part in parts] + none)
        mine = [sizes[local.index] for sizes in counts]
        partial = [np.empty(size, arithmetic.accumulator) for size in mine]
        result = [np.empty(size, arithmetic.output_dtype) for size in mine]
        with activity("HIERARCHICAL_REDUCESCATTER"):
            self._shm.reduce_parts(local, inputs, partial, counts, arithmetic.inner())
        if layers.has_slice:
            with activity(f"HIERARCHICAL_{algorithm.phase}"):
                self.allreduce_by(algorithm, layers.ring_order, partial, result, arithmetic.outer())
        self._shm.allgather(local, result, outputs, counts, activity)


class _Pipeline:
    """A large allreduce in blocks, driven by the schedule of what runs between hosts."""

    def __init__(
        self,
        shm: ShmBackend,
        algorithm: Algorithm,
        layers: Layers,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        arithmetic: Arithmetic,
        piece_bytes: int,
        activity: Activity,
    ) -> None:
        self._shm, self._algorithm, self._layers = shm, algorithm, layers
        self._arithmetic, self._activity = arithmetic, activity
        self._chunks = algorithm.blocks(layers.ring_order)
        self._sources = self._cut(inputs)
        self._targets = self._cut(outputs)
        # The memory of the blocks under way, by number: a row for each chunk. Sums over the host,
        # and over all hosts; both are the same memory if the dtype is the same.
        self._partial: dict[int, Array] = {}
        self._result: dict[int, Array] = {}
        self._free: list[tuple[Array, Array]] = []
        itemsize = arithmetic.output_dtype.itemsize
        elements = sum(array.size for array in inputs) // layers.slices
        length = self._piece_length = algorithm.length(
            layers.ring_order, piece_bytes, itemsize, elements
        )
        largest = max(chunk.size for chunks in self._sources for chunk in chunks)
        self._pieces = -(-largest // length)
        self._length = BLOCK_PIECES * length  # elements of a chunk in a block

    def _cut(self, arrays: Sequence[Array]) -> list[list[Chain]]:
        slices, count = self._layers.slices, self._chunks
        cut = []
        for index in range(slices):
            parts = [array[even_part(array.size, slices, index)] for array in arrays]
            cut.append([even_chain(parts, count, chunk) for chunk in range(count)])
        return cut

    @property
    def _slice_chunks(self) -> list[Chain]:
        return self._sources[self._layers.local.index]

    def plan(self) -> Pipeline:
        """Return what runs between the hosts."""
        chunks = self._slice_chunks if self._layers.has_slice else self._sources[0]
        windows = [
            PieceWindow(chunk.size, index, self._length, self._partial, self._result)
            for index, chunk in enumerate(chunks)
        ]
        return self._algorithm.plan(
            self._layers.ring_order,
            sources=windows,
            targets=windows,
            arithmetic=self._arithmetic.outer(),
            length=self._piece_length,
            before=self._before,
            after=self._after,
            fewest_pieces=self._pieces,
        )

    def _before(self, piece: int) -> None:
        """Reduce-scatter a block inside the host when its first piece is needed."""
        if piece % BLOCK_PIECES:
            return
        block = piece // BLOCK_PIECES
        if self._free:
            memory = self._free.pop()
        else:
            shape, dtype = (self._chunks, self._length), self._arithmetic.accumulator
            sums = results = np.empty(shape, dtype)
            if self._arithmetic.output_dtype != dtype:
                results = np.empty(shape, self._arithmetic.output_dtype)
            memory = sums, results
        self._partial[block], self._result[block] = memory
        arrays, counts = self._parts(self._sources, block)
        partial = self._rows(memory[0], block)
        with self._activity("HIERARCHICAL_REDUCESCATTER"):
            self._shm.reduce_parts(
                self._layers.local, arrays, partial, counts, self._arithmetic.inner()
            )

    def _after(self, piece: int) -> None:
        """Gather a block inside the host when its last piece has come back."""
        if (piece + 1) % BLOCK_PIECES and piece + 1 < self._pieces:
            return
        block = piece // BLOCK_PIECES
        memory = self._partial.pop(block), self._result.pop(block)
        arrays, counts = self._parts(self._targets, block)
        result = self._rows(memory[1], block)
        self._shm.allgather(self._layers.local, result, arrays, counts, self._activity)
        self._free.append(memory)

    def _parts(
        self, slices: Sequence[Sequence[Chain]], block: int
    ) -> tuple[list[Array], list[list[int]]]:
        """Return the parts of the tensors in `block`, and the elements each local member has."""
        start, local_size = block * self._length, self._layers.local.size
        arrays, counts = [], []
        for owner, chunks in enumerate(slices):
            for chunk in chunks:
                for view in chunk.views(start, min(start + self._length, chunk.size)):
                    arrays.append(view)
                    counts.append(
                        [view.size if owner == member else 0 for member in range(local_size)]
                    )
        return arrays, counts

    def _rows(self, rows: Array, block: int) -> list[Array]:
        """Return the part of `rows` that this member has of `block`."""
        if not self._layers.has_slice:
            return [rows[0, :0]]
        start = block * self._length
        sizes = [min(max(chunk.size - start, 0), self._length) for chunk in self._slice_chunks]
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]
