"""The control tree: ranks report to the leader of their host, leaders to rank 0 or to leaders.

With three hosts, an arrow points to the rank that receives the reports:

    hosts:   A = (0, 1)     B = (2, 3)     C = (4, 5)
             0 <- 1
             0 <- 2 <- 3
             0 <- 4 <- 5

Beyond `FAN_OUT` hosts, leaders report to leaders: host i to host (i - 1) // FAN_OUT.
"""

from __future__ import annotations

from functools import cached_property

from hvdlite.common.base.topology import Topology

FAN_OUT = 32
ROOT = 0


class Tree:
    """The control tree as one rank sees it."""

    def __init__(self, topology: Topology, rank: int, fan_out: int = FAN_OUT) -> None:
        self._topology, self._fan_out, self.rank = topology, fan_out, rank

    @property
    def is_root(self) -> bool:
        """Whether this rank runs the coordinator."""
        return self.rank == ROOT

    @cached_property
    def parent(self) -> int:
        """The rank that this rank reports to. The root has none: ask `is_root` first."""
        leader = self._topology.leader(self.rank)
        if self.rank != leader:
            return leader
        return self._topology.hosts[(self._topology.host_of[self.rank] - 1) // self._fan_out][0]

    @cached_property
    def children(self) -> tuple[int, ...]:
        """The ranks that report to this rank, ascending."""
        return self._children(self.rank)

    @cached_property
    def neighbours(self) -> frozenset[int]:
        """The ranks with which this rank exchanges control messages."""
        return frozenset(self.children if self.is_root else (*self.children, self.parent))

    @cached_property
    def subtree(self) -> frozenset[int]:
        """The ranks of the subtree whose root is this rank."""
        return self.subtree_of(self.rank)

    def subtree_of(self, rank: int) -> frozenset[int]:
        """Return the ranks of the subtree whose root is `rank`."""
        below = [rank]
        for each in below:  # The list grows while the loop visits it: a breadth-first search.
            below += self._children(each)
        return frozenset(below)

    def _children(self, rank: int) -> tuple[int, ...]:
        local = self._topology.peers(rank)
        if rank != local[0]:
            return ()
        first = self._topology.host_of[rank] * self._fan_out + 1
        hosts = self._topology.hosts[first : first + self._fan_out]
        return tuple(sorted((*local[1:], *(host[0] for host in hosts))))


def neighbours(topology: Topology, rank: int) -> frozenset[int]:
    """Return the ranks with which `rank` exchanges control messages."""
    return Tree(topology, rank).neighbours
