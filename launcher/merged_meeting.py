"""The meetings of ranks on several hosts: merge what the agents of the hosts have gathered.

This module never sends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

Key = tuple[tuple[int, ...], int]  # The members (none: all ranks), and the round.


class MergedMeeting:
    """The rounds that not all members have come to."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._rounds: dict[Key, dict[int, bytes]] = {}

    def add(
        self, members: Sequence[int], number: int, bodies: Mapping[int, bytes]
    ) -> list[bytes] | None:
        """Add what one host has gathered; return the bodies of all members when none is missing."""
        key = (tuple(members), number)
        self._rounds.setdefault(key, {}).update(bodies)
        if self.missing(members, number):
            return None
        known = self._rounds.pop(key)
        return [known[rank] for rank in members or range(self._size)]

    def withdraw(self, members: Sequence[int], number: int, ranks: Collection[int]) -> None:
        """Take back what the host of `ranks` has gathered."""
        known = self._rounds.get((tuple(members), number), {})
        for rank in ranks:
            known.pop(rank, None)

    def missing(self, members: Sequence[int], number: int) -> list[int]:
        """Return the members whose hosts have not gathered the round."""
        known = self._rounds.get((tuple(members), number), {})
        return [rank for rank in members or range(self._size) if rank not in known]
