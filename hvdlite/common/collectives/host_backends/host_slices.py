"""The members of several hosts in two layers: those of each host, and one of each host in slices.

Between the hosts there are as many slices as the smallest host has members: the members with the
same place on their hosts exchange one slice of the data, so that several ranks of a host use its
link at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hvdlite.common.collectives.base import Activity, Array, Members
from hvdlite.common.collectives.between_hosts.pipeline import RingOrder
from hvdlite.common.collectives.chained_view import Chain
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
        """Return the layers of `members`."""
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
        """The number of this host."""
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
