"""The collectives among several hosts but allreduce: shared memory inside, few messages between.

Each backend between hosts is one of these, and adds its allreduce: that of hosts with one member
each is here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.base import Activity, Array, Members, Reduction
from hvdlite.common.collectives.between_hosts.algorithms import Algorithm, Choice, paths_of
from hvdlite.common.collectives.between_hosts.costs import PIECE_BYTES, tree_piece_bytes
from hvdlite.common.collectives.between_hosts.pipeline import Pipeline, RingOrder
from hvdlite.common.collectives.between_hosts.ring import RingBackend
from hvdlite.common.collectives.chained_view import Chain
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.collectives.multi_host.alltoall import HostExchange
from hvdlite.common.collectives.multi_host.broadcast import Carriers, HostBroadcast
from hvdlite.common.collectives.multi_host.host_slices import (
    Inside,
    Layers,
    blocks_of,
    one_hot,
    pieces_of,
)
from hvdlite.common.collectives.multi_host.reducescatter import HostScatter
from hvdlite.common.collectives.shm import ShmBackend
from hvdlite.common.transport.base import Transport

# Allgather over several hosts: each byte goes to each other host once.
#
# The block of this host is gathered through shared memory, straight into the results. The members
# with the same place pass on their slices of all blocks from host to host, and share what has come
# with the ranks of their hosts. All of that goes on piece by piece, at the same time.


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
        slices = [Chain(list(block.views(block.slices[place]))) for block in self._blocks]
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


class HostsBackend(RingBackend):
    """Reducescatter, allgather, broadcast and alltoall among the members of several hosts."""

    def __init__(
        self,
        transport: Transport,
        shm: ShmBackend | None,
        piece_bytes: int = PIECE_BYTES,
        choice: Choice | None = None,
    ) -> None:
        """Choose what runs between the hosts by `choice` (default: rings).

        No `shm` is needed where each host has one member.
        """
        super().__init__(transport, piece_bytes)
        self._shm = shm
        self._choice = choice or Choice("ring")

    def doubles(self, members: Members, nbytes: int) -> bool:
        """Return whether a tensor of `nbytes` is reduced by recursive doubling."""
        layers = Layers.of(members)
        return self._choice.of(len(layers.hosts), layers.slices, nbytes).name == "doubling"

    def reducescatter(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        counts: Sequence[Sequence[int]],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        """See `Backend.reducescatter`. Summed by local members first, then across the hosts."""
        if not inputs:
            return
        layers, inside = self._layered(members, activity)
        arithmetic = Arithmetic(inputs[0].dtype, reduction)
        groups = self._choice.scatter_groups(len(layers.hosts), layers.slices, inputs)
        for algorithm, numbers in groups.items():
            scatter = HostScatter(
                inside,
                layers,
                [inputs[number] for number in numbers],
                [outputs[number] for number in numbers],
                [counts[number] for number in numbers],
                arithmetic,
            )
            plan = scatter.plan(algorithm, self.piece_bytes)
            with activity(f"{self.name}_{algorithm.phase}_REDUCESCATTER"):
                self._run_layers(layers, plan)

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
        layers, inside = self._layered(members, activity)
        gather = HostGather(inside, layers, inputs, outputs, counts)
        algorithm = self._choice.gather(len(layers.hosts), layers.slices, gather.nbytes)
        plan = gather.plan(algorithm, self.piece_bytes)
        with activity(f"{self.name}_{algorithm.phase}_ALLGATHER"):
            self._run_layers(layers, plan)

    def broadcast(
        self, members: Members, arrays: Sequence[Array], root: int, activity: Activity
    ) -> None:
        nbytes = sum(array.nbytes for array in arrays)
        if not nbytes:
            return
        layers, inside = self._layered(members, activity)
        carriers = Carriers.of(layers, members.ranks, root)
        piece_bytes = min(self.piece_bytes, tree_piece_bytes(nbytes))
        broadcast = HostBroadcast(
            self._transport, inside, carriers, layers.host, arrays, piece_bytes
        )
        way = self._choice.path(len(layers.hosts), nbytes)
        with activity(f"{self.name}_{way.upper()}_BROADCAST"):
            if carriers.places[layers.host] == layers.local.index:
                paths = paths_of(way, len(layers.hosts), carriers.root_host, layers.host)
                broadcast.carry(paths)
            else:
                broadcast.take_part()

    def alltoall(
        self,
        members: Members,
        array: Array,
        send_counts: Sequence[int],
        allocate: Callable[[list[int]], Array],
        activity: Activity,
    ) -> None:
        layers, inside = self._layered(members, activity)
        exchange = HostExchange(self._transport, inside, layers, members, self._choice.model)
        with activity(f"{self.name}_ALLTOALL"):
            exchange.run(array, send_counts, allocate)

    def _layered(self, members: Members, activity: Activity) -> tuple[Layers, Inside]:
        layers = Layers.of(members)
        return layers, Inside(self._shm, layers.local, activity)

    def _run_layers(self, layers: Layers, plan: Pipeline) -> None:
        """Run what goes on between hosts, or what this member does while it does."""
        if layers.has_slice:
            plan.run(self._transport)
        else:
            plan.watch()


class FlatBackend(HostsBackend):
    """All collectives among hosts of one member each, by one of `algorithms` for each size."""

    name = "FLAT"

    def __init__(self, transport: Transport, choice: Choice) -> None:
        super().__init__(transport, None, choice=choice)

    def supports(
        self, collective: str, dtype: np.dtype[Any], reduce_op: ReduceOp, members: Members
    ) -> bool:
        """Support all but Adasum. Between two hosts only allreduce has more than one algorithm."""
        hosts = members.topology.hosts
        fewest = 2 if collective == "allreduce" else 3
        flat = len(hosts) == members.size >= fewest
        return flat and reduce_op != ReduceOp.ADASUM

    def allreduce(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        if not inputs:
            return
        order, arithmetic = RingOrder.of(members), Arithmetic(inputs[0].dtype, reduction)
        for algorithm, numbers in self._choice.groups(members.size, 1, inputs).items():
            part = [inputs[number] for number in numbers], [outputs[number] for number in numbers]
            with activity(f"{algorithm.phase}_ALLREDUCE"):
                self.allreduce_by(algorithm, order, *part, arithmetic)
