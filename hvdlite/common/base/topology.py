"""Which rank runs on which host: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """The hosts of a job, each with its ranks in ascending order; hosts ordered by first rank."""

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def single_host(cls, size: int) -> Topology:
        """All `size` ranks on one host."""
        return cls((tuple(range(size)),))

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return sum(len(host) for host in self.hosts)

    @cached_property
    def host_of(self) -> dict[int, int]:
        """rank -> index of its host."""
        return {rank: index for index, host in enumerate(self.hosts) for rank in host}

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks on the host of `rank`, itself included."""
        return self.hosts[self.host_of[rank]]

    def local_rank(self, rank: int) -> int:
        """Position of `rank` among the ranks of its host."""
        return self.peers(rank).index(rank)

    def cross_peers(self, rank: int) -> tuple[int, ...]:
        """The ranks with this local rank, one for each host that has so many ranks."""
        local = self.local_rank(rank)
        return tuple(host[local] for host in self.hosts if len(host) > local)

    @cached_property
    def homogeneous(self) -> bool:
        """Every host has the same number of ranks."""
        return len({len(host) for host in self.hosts}) == 1

    def leader(self, rank: int) -> int:
        """The first rank of the host of `rank`: it speaks for the host."""
        return self.peers(rank)[0]

    def restrict(self, members: tuple[int, ...]) -> Topology:
        """The same hosts with only `members`, renumbered 0, 1, ... in the order of `members`."""
        index = {rank: position for position, rank in enumerate(members)}
        hosts = (tuple(index[r] for r in host if r in index) for host in self.hosts)
        return Topology(tuple(sorted((host for host in hosts if host), key=lambda h: h[0])))
