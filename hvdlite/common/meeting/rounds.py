"""The rounds of the meetings of one server: who has given what, who is missing, who has left.

A meeting is that of some ranks, its members, and has rounds that are numbered from 0. A rank takes
part in one meeting at a time. In round 0, the members gather, and a rank that leaves may come
again. Every later round needs those who were in round 0: when one of them leaves, the others are
told at once. A rank whose process has finished can come to no round any more, so rounds that need
it end at once. This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.connections.frames import pack
from hvdlite.common.meeting.wire import BODIES, FAIL, GIVE_UP, OTHER_HVDLITE


class Key(NamedTuple):
    """One round: the members of its meeting in rank order (none: all ranks), and its number."""

    members: tuple[int, ...]
    number: int


class Guest(Protocol):
    """A rank that takes part in a meeting."""

    rank: int
    members: tuple[int, ...]
    given: int  # The number of rounds to which it has given its body.

    def send(self, head: bytes) -> None:
        """Send a packed message to the rank; never blocks."""


Gathered = Callable[[Key, dict[int, bytes]], None]
Withdrawn = Callable[[Key], None]


class Rounds:
    """The meetings of those of `ranks` who are here, `size` being the number of all ranks.

    See `MeetingServer` for `gathered` and `withdrawn`.
    """

    def __init__(
        self,
        ranks: Collection[int],
        size: int,
        gathered: Gathered | None = None,
        withdrawn: Withdrawn | None = None,
    ) -> None:
        self.ranks = sorted(ranks)
        self.size = size
        self.guests: dict[int, Guest] = {}
        # Ranks that were here at any time.
        self.seen: set[int] = set()
        # Missing ranks elsewhere, by members, as whoever merges the rounds of several hosts says.
        self.missing_elsewhere: dict[tuple[int, ...], list[int]] = {}
        self._gathered, self._withdrawn = gathered, withdrawn
        self._bodies: dict[Key, dict[int, bytes]] = {}
        # Ranks that have left at any time, in that order: others leave because the first one has.
        self._gone: dict[int, None] = {}
        # Ranks that gave to a round and left before its answer.
        self._left: dict[Key, set[int]] = {}
        # Members of meetings whose first round was answered.
        self._met: set[int] = set()
        # Ranks whose processes have ended with exit code 0.
        self._finished: set[int] = set()
        # Ranks that were refused as they run another hvdlite, and which one.
        self._other_versions: dict[int, str] = {}

    def present(self, guest: Guest) -> None:
        self.guests[guest.rank] = guest
        self.seen.add(guest.rank)

    def give(self, guest: Guest, body: bytes) -> None:
        """Take the body of `guest` for its next round.

        Raises `ProtocolError` while an earlier round of the guest has no answer.
        """
        if guest.rank in self._bodies.get(Key(guest.members, guest.given - 1), ()):
            raise ProtocolError(f"rank {guest.rank} gives to a round before the last one is over")
        key = Key(guest.members, guest.given)
        guest.given += 1
        bodies = self._bodies.setdefault(key, {})
        bodies[guest.rank] = body
        self._left.get(key, set()).discard(guest.rank)
        if self._fail_without_finished(key) or self._fail_with_other_version(key):
            return
        local = self._local(key.members)
        absent = [rank for rank in local if not self._takes_part(rank, key)]
        if absent:
            self._fail_round(key, next((rank for rank in self._gone if rank in absent), absent[0]))
            return
        if len(bodies) == len(local):
            if self._gathered is None:
                self.deliver(key, [bodies[rank] for rank in key.members or self.ranks])
            else:
                self._gathered(key, dict(bodies))

    def deliver(self, key: Key, bodies: Sequence[bytes]) -> None:
        """Answer the round `key` with the bodies of its ranks in rank order; no-op if nobody waits.

        Without members in `key`, these are all ranks of the job. When a rank has left, or has come
        again, after its host had gathered, the bodies hold what it gave before: the round fails.
        """
        here, local = self._bodies.get(key, {}), self._local(key.members)
        given = dict(zip(key.members or range(self.size), bodies, strict=True))
        old = [rank for rank in local if here.get(rank) != given[rank]]
        if here and old:
            if self._withdrawn and len(here) == len(local):  # It was gathered anew.
                self._withdrawn(key)
            self._fail_round(key, old[0])
            return
        head = pack([BODIES, key.number, list(bodies)])
        if key.number == 0:
            self._met.update(key.members or range(self.size))
        for rank in self._bodies.pop(key, ()):
            self.guests[rank].send(head)
        self.missing_elsewhere.pop(key.members, None)
        self._left.pop(key, None)

    def leave(self, guest: Guest) -> None:
        """Withdraw what `guest` has given to rounds without an answer, and end what needs it."""
        if self.guests.get(guest.rank) is not guest:
            return
        del self.guests[guest.rank]
        self._gone.pop(guest.rank, None)
        self._gone[guest.rank] = None
        for key in [key for key in self._bodies if key.members == guest.members]:
            bodies = self._bodies[key]
            if bodies.pop(guest.rank, None) is not None:
                self._left.setdefault(key, set()).add(guest.rank)
                if self._withdrawn and len(bodies) + 1 == len(self._local(key.members)):
                    self._withdrawn(key)
                if not bodies:
                    del self._bodies[key], self._left[key]
            if bodies and key.number:
                self._fail_round(key, guest.rank)

    def finish(self, ranks: Collection[int]) -> None:
        """Note that the processes of `ranks` have ended with exit code 0, here or elsewhere.

        Ranks that wait for one of them, or will, raise `HorovodInternalError`.
        """
        self._finished.update(ranks)
        for key in list(self._bodies):
            self._fail_without_finished(key)

    def note_same_version(self, rank: int) -> None:
        """Note that a process of `rank` with this protocol has come."""
        self._other_versions.pop(rank, None)

    def note_other_version(self, rank: int, version: str) -> None:
        """Note that `rank` runs another hvdlite, with another protocol; end what needs it."""
        self._other_versions[rank] = version
        for key in list(self._bodies):
            self._fail_with_other_version(key)

    def fail(self, text: str, rank: int | None = None, keys: Collection[Key] | None = None) -> None:
        """Raise an error in all ranks that wait (in `keys`, if given); `rank` is at fault."""
        self._end(list(self._bodies) if keys is None else keys, pack([FAIL, text, rank]))

    def give_up(self, text: str) -> None:
        """End all rounds before the server ends: ranks that nobody has answered may meet elsewhere.

        The others raise `HorovodInternalError` with `text`.
        """
        self._end([key for key in self._bodies if key.number == 0], pack([GIVE_UP, text]))
        self.fail(text)

    def _end(self, keys: Collection[Key], head: bytes) -> None:
        """Send a packed message to all ranks that wait in `keys`."""
        for key in keys:
            self._left.pop(key, None)
            for waiting in self._bodies.pop(key, ()):
                self.guests[waiting].send(head)

    def missing(self, key: Key | None = None) -> list[int]:
        """Return the ranks that never came to `key`; without a key, those that were never here."""
        if key is None:
            return [rank for rank in self.ranks if rank not in self.seen]
        came = {*self.waiting(key), *self.left(key)}
        local = self._local(key.members)
        elsewhere = {*self.missing_elsewhere.get(key.members, ())} - {*local}
        return sorted({rank for rank in local if rank not in came} | elsewhere)

    def came_elsewhere(self, key: Key) -> list[int] | None:
        """Return the ranks of other hosts that have come to `key`; None where nobody has told."""
        others = {*(key.members or range(self.size))} - {*self.ranks}
        if others and key.members not in self.missing_elsewhere:
            return None
        return sorted(others - {*self.missing_elsewhere.get(key.members, ())})

    def incomplete(self) -> dict[Key, list[int]]:
        """Return who waits in the rounds that not all ranks here have given their body to."""
        return {
            key: self.waiting(key)
            for key, bodies in self._bodies.items()
            if len(bodies) < len(self._local(key.members))
        }

    def waiting(self, key: Key) -> list[int]:
        """Return the ranks that have given their body to the round `key` and wait."""
        return sorted(self._bodies.get(key, ()))

    def left(self, key: Key) -> list[int]:
        """Return the ranks that came to the round `key` and did not wait for its end."""
        return sorted(self._left.get(key, ()))

    def _local(self, members: tuple[int, ...]) -> list[int]:
        return [rank for rank in self.ranks if not members or rank in members]

    def _takes_part(self, rank: int, key: Key) -> bool:
        """Return whether `rank` may still come to the round `key`."""
        guest = self.guests.get(rank)
        if guest is None or guest.members != key.members:
            return key.number == 0
        last = Key(key.members, guest.given - 1)
        answered = guest.given - (rank in self._bodies.get(last, ()))
        return answered >= key.number

    def _fail_without_finished(self, key: Key) -> bool:
        """Fail a round that a finished rank would have to come to; return whether there is one."""
        needed = self._finished.intersection(key.members or self._finished)
        if not needed:
            return False
        rank = min(needed)
        came = rank in self._met or rank in self.seen
        self.fail(
            f"rank {rank} ended with exit code 0 {'before' if came else 'without calling'} "
            f"{'this ' * came}init(), which waits for it: call init() on every rank, or only on "
            "those in its argument comm",
            rank,
            [key],
        )
        return True

    def _fail_with_other_version(self, key: Key) -> bool:
        """End a round that a rank of another version would have to come to; return whether."""
        for rank, version in self._other_versions.items():
            if not key.members or rank in key.members:
                self._end([key], pack([OTHER_HVDLITE, rank, version]))
                return True
        return False

    def _fail_round(self, key: Key, rank: int) -> None:
        text = f"rank {rank} has left while the ranks of this job connected"
        self.fail(text, rank, [key])
