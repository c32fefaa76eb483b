"""The server of a meeting: it answers each round when all of its ranks have given their body.

A rank that is refused is told why, and the others go on.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Collection
from typing import Any

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.connections import prove
from hvdlite.common.connections.link import Link
from hvdlite.common.connections.listener import Listener, Refusal
from hvdlite.common.connections.loop import Loop
from hvdlite.common.connections.prove import Claim, Party
from hvdlite.common.connections.strangers import peer_name
from hvdlite.common.meeting import wire
from hvdlite.common.meeting.rounds import Gathered, Guest, Key, Rounds, Withdrawn
from hvdlite.common.meeting.start_wait import Presence, spell_ranks

SILENCE_SECONDS = 5.0  # A stranger that has not proven its claim after this time is dropped.
NOTES = 8  # The most refusals that are remembered for those who wait.

SECRETS_DIFFER = "has another secret: HVDLITE_SECRET must be the same for all ranks of a job"

log = logging.getLogger("hvdlite")


class _LinkedRank:
    """A rank at the other end of a link; see `Guest`."""

    link: Link

    def __init__(self, rank: int, peer: str) -> None:
        self.rank, self.peer = rank, peer
        self.members: tuple[int, ...] = ()
        self.given = 0

    def send(self, head: bytes) -> None:
        self.link.send_head(head)


class MeetingServer:
    """The server of `ranks`, which are all of a job of `size` ranks, or those of one host.

    Its `rounds` take what ranks of this process, and other hosts, say. When all of `ranks` have
    given their body to a round, ``gathered(key, {rank: body})`` is called, and `Rounds.deliver`
    answers the round with the bodies of all ranks of the job; without `gathered`, the server has
    all ranks and answers by itself. Where a rank leaves after that and before the answer,
    ``withdrawn(key)`` is called: its host gathers the round anew.

    `job` tells jobs and their restarts apart that have the same address and secret, one after the
    other; it has `wire.JOB_BYTES` bytes. The server is driven by `loop`, and closes `listener`.
    """

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        ranks: Collection[int],
        size: int,
        secret: bytes = b"",
        gathered: Gathered | None = None,
        *,
        withdrawn: Withdrawn | None = None,
        job: bytes = bytes(wire.JOB_BYTES),
    ) -> None:
        if gathered is None and sorted(ranks) != list(range(size)):
            raise ValueError("a server of some of the ranks needs `gathered`")
        self._loop, self._job = loop, job
        self.rounds = Rounds(ranks, size, gathered, withdrawn)
        # Refusals, the latest last, for those who wait for the rank that was refused.
        self._notes: deque[str] = deque(maxlen=NOTES)
        self._linked: dict[_LinkedRank, None] = {}
        self._listener = Listener(
            loop, [listener], Party(secret, wire.SERVER, wire.RANK), self._accept,
            judge=self._judge,
            refused=self._note_refusal, most_strangers=2 * len(ranks) + 64,
            stranger_seconds=SILENCE_SECONDS, other_secret=SECRETS_DIFFER,
        )  # fmt: skip

    # -- for whoever runs the loop

    def notes(self) -> list[str]:
        """Return sentences about the last connections that were refused."""
        return list(self._notes)

    def presence(self, guest: Guest) -> Presence:
        """Return who has come to the round that `guest` waits in, and who has not."""
        key = Key(guest.members, max(0, guest.given - 1))
        rounds = self.rounds
        return Presence(
            rounds.missing(key), rounds.waiting(key), rounds.left(key), self.notes(),
            rounds.came_elsewhere(key),
        )  # fmt: skip

    def close(self, drain_seconds: float = 0.0) -> None:
        """Stop to listen; close all connections when their ranks have left, or after a time.

        A connection that is closed with something unread would take back what was sent last.
        """
        self._listener.close()
        end = self._loop.now() + drain_seconds
        while (left := end - self._loop.now()) > 0:
            if not any(isinstance(guest, _LinkedRank) for guest in self.rounds.guests.values()):
                break
            self._loop.run_once(left)
        for guest in self._linked:
            guest.link.close()
        self._linked.clear()

    def after_fork_in_child(self) -> None:
        """Close this process's copies of all descriptors; those of the loop are closed already."""
        self._listener.close()
        for guest in self._linked:
            guest.link.close_after_fork()

    # -- connections

    def _judge(self, proven: Claim) -> Refusal | None:
        """Return why the rank with this claim may not take part. Raises `ProtocolError`."""
        claim, rounds = wire.read_claim(proven.body), self.rounds
        code, sentence = wire.REFUSED, ""
        if claim.job != self._job:
            code, sentence = wire.OTHER_JOB, "is of another job, or of another start of this one"
        elif claim.size != rounds.size:
            sentence = (
                f"counts {claim.size} ranks in the job, and the rank or launcher that serves the "
                f"meeting counts {rounds.size}"
            )
        elif claim.rank not in rounds.ranks:
            sentence = f"does not meet here: the ranks here are {spell_ranks(rounds.ranks)}"
        elif claim.rank in rounds.guests:
            code, sentence = wire.DUPLICATE, "is here already: two processes have the same rank"
        return Refusal(code, f"rank {claim.rank} {sentence}") if sentence else None

    def _accept(self, claim: Claim, connection: socket.socket) -> None:
        guest = _LinkedRank(wire.read_claim(claim.body).rank, peer_name(connection))
        self._linked[guest] = None
        self.rounds.note_same_version(guest.rank)

        def ended(reason: str) -> None:
            del self._linked[guest]
            if guest.link.at_fault:
                self._note(f"a connection from {guest.peer} was closed: {reason}")
            self.rounds.leave(guest)

        guest.link = Link(
            self._loop, connection, received=lambda message, arrays: self._obey(guest, message),
            ended=ended, most_bytes=wire.FRAME_BYTES,
        )  # fmt: skip

    def _note_refusal(self, code: int, sentence: str, claim: Claim | None) -> None:
        if code == prove.OTHER_PROTOCOL and claim is not None:
            # The body of a claim keeps its form whatever the protocol is.
            found, rounds = wire.read_claim(claim.body), self.rounds
            if (found.job, found.size) != (
                self._job,
                rounds.size,
            ) or found.rank not in rounds.ranks:
                return  # Another job may use the same addresses without a secret.
            rounds.note_other_version(found.rank, str(claim.software))
            sentence = sentence.replace(claim.role, f"rank {found.rank}", 1)
        if code not in (wire.OTHER_JOB, wire.DUPLICATE):
            self._note(sentence)

    def _note(self, sentence: str) -> None:
        if sentence not in self._notes:
            log.debug("meeting: %s", sentence)
            self._notes.append(sentence)

    def _obey(self, guest: _LinkedRank, message: list[Any]) -> None:
        match message:
            case [wire.JOIN, [*members]] if self._is_part(members, guest.rank):
                if guest.given or guest.rank in self.rounds.guests:
                    raise ProtocolError(f"rank {guest.rank} joins twice")
                guest.members = tuple(members)
                self.rounds.present(guest)
            case [wire.GATHER, int(number), bytes(body)] if number == guest.given:
                if self.rounds.guests.get(guest.rank) is not guest:
                    raise ProtocolError(f"rank {guest.rank} has not joined")
                self.rounds.give(guest, body)
            case [wire.WHO]:
                guest.link.send(wire.PRESENCE, *self.presence(guest))
            case [wire.LEAVE]:
                self.rounds.leave(guest)
            case _:
                raise ProtocolError(f"rank {guest.rank} sent {str(message)[:80]}")

    def _is_part(self, members: list[Any], rank: int) -> bool:
        """Return whether `members` are ranks of the job, in any order, and `rank` is one."""
        known = all(isinstance(each, int) and 0 <= each < self.rounds.size for each in members)
        return not members or (known and rank in members and len(set(members)) == len(members))
