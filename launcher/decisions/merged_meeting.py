"""The meetings of ranks on several hosts: merge what the agents of the hosts have gathered.

In an elastic job, each member of a world is one that has gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

Key = tuple[tuple[int, ...], int]  # The members (none: all ranks), and the round.


class MergedMeeting:
    """The rounds that not all members have come to."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._rounds: dict[Key, dict[int, bytes]] = {}
        # Ranks that wait for others of their host.
        self._came: dict[Key, set[int]] = {}
        # Rounds of which `news` has something to tell.
        self._changed: set[Key] = set()

    def add(
        self, members: Sequence[int], number: int, bodies: Mapping[int, bytes]
    ) -> list[bytes] | None:
        """Add what one host has gathered; return the bodies of all members when none is missing."""
        key = (tuple(members), number)
        known = self._rounds.setdefault(key, {})
        known.update(bodies)
        if len(known) < (len(members) or self._size):
            self._changed.add(key)
            return None
        del self._rounds[key]
        self._came.pop(key, None)
        self._changed.discard(key)
        return [known[rank] for rank in members or range(self._size)]

    def withdraw(self, members: Sequence[int], number: int, ranks: Collection[int]) -> None:
        """Take back what the host of `ranks` has gathered."""
        key = (tuple(members), number)
        known = self._rounds.get(key, {})
        for rank in ranks:
            known.pop(rank, None)
        self._changed.add(key)

    def note(
        self, members: Sequence[int], number: int, ranks: Collection[int], came: Collection[int]
    ) -> None:
        """Note who of the `ranks` of a host has come to a round that the host has not gathered."""
        key = (tuple(members), number)
        waiting = (self._came.pop(key, set()) - {*ranks}) | {*came}
        if waiting:
            self._came[key] = waiting
        self._changed.add(key)
        if not waiting and not self._rounds.get(key):  # It is over, or nobody waits.
            self._changed.discard(key)

    def missing(self, members: Sequence[int], number: int) -> list[int]:
        """Return the members that have not come to the round, as far as their hosts have told."""
        key = (tuple(members), number)
        came = {*self._rounds.get(key, ()), *self._came.get(key, ())}
        return [rank for rank in members or range(self._size) if rank not in came]

    def news(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the members, and those who are missing, of the rounds that have changed."""
        changed, self._changed = self._changed, set()
        for members, number in changed:
            yield list(members), self.missing(members, number)
