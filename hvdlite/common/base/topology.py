"""The topology of a job: which rank runs on which host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """The hosts of a job, each with its ranks in ascending order; hosts ordered by first rank.

    Raises `ValueError` for hosts in another order, and unless each rank from 0 on is on one host.
    """

    hosts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        # Two ranks that order hosts differently would send messages that nobody expects.
        if list(self.hosts) != sorted(self.hosts) or not all(self.hosts):
            raise ValueError(f"hosts must each have ranks, and be in order of the first: {self}")
        for host in self.hosts:
            if list(host) != sorted(host):
                raise ValueError(f"the ranks of a host must be in order, not {host}: {self}")
        ranks = sorted(rank for host in self.hosts for rank in host)
        if ranks != list(range(len(ranks))):
            raise ValueError(f"each rank from 0 on must be on one host: {self}")

    @classmethod
    def single_host(cls, size: int) -> Topology:
        return cls((tuple(range(size)),))

    @cached_property
    def size(self) -> int:
        return sum(len(host) for host in self.hosts)

    @cached_property
    def host_of(self) -> dict[int, int]:
        """The index of the host of each rank."""
        return {rank: index for index, host in enumerate(self.hosts) for rank in host}

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on the host of `rank`, itself included."""
        return self.hosts[self.host_of[rank]]

    def local_rank(self, rank: int) -> int:
        """Return the position of `rank` among the ranks of its host."""
        return self.peers(rank).index(rank)

    def cross_peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same local rank, one for each host that has so many ranks."""
        local = self.local_rank(rank)
        return tuple(host[local] for host in self.hosts if len(host) > local)

    @cached_property
    def homogeneous(self) -> bool:
        """Whether every host has the same number of ranks."""
        return len({len(host) for host in self.hosts}) == 1

    def fills(self, cores: int, threads: int = 1) -> bool:
        """Return whether ranks that compute with `threads` each take all `cores` of the only host.

        Between several hosts there is time in which nobody computes.
        """
        return len(self.hosts) == 1 and self.size * threads >= cores

    def leader(self, rank: int) -> int:
        """Return the first rank of the host of `rank`, which speaks for the host."""
        return self.peers(rank)[0]

    def restrict(self, members: tuple[int, ...]) -> Topology:
        """Return the same hosts with only `members`, renumbered by their position in `members`."""
        index = {rank: position for position, rank in enumerate(members)}
        hosts = (tuple(sorted(index[r] for r in host if r in index)) for host in self.hosts)
        return Topology(tuple(sorted(host for host in hosts if host)))
