"""The server of a meeting: it answers each round when all of its ranks have given their body.

Strangers connect, too: see doorway.py. A rank that is refused is told why, and the others go on.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.connections.address import EXHAUSTED
from hvdlite.common.meeting import wire
from hvdlite.common.meeting.admission import Admission
from hvdlite.common.meeting.connection import Connection
from hvdlite.common.meeting.doorway import SILENCE_SECONDS, Doorway
from hvdlite.common.meeting.patience import Presence
from hvdlite.common.meeting.rounds import Gathered, Guest, Key, Rounds, Withdrawn

NOTES = 8  # The most refusals that are remembered for those who wait.

log = logging.getLogger("hvdlite")


class MeetingServer(Doorway):
    """The server of `ranks`, which are all of a job of `size` ranks, or those of one host.

    When all of `ranks` have given their body to a round, ``gathered(key, {rank: body})`` is called,
    and `deliver` answers the round with the bodies of all ranks of the job; without `gathered`, the
    server has all ranks and answers by itself. Where a rank leaves after that and before the
    answer, ``withdrawn(key)`` is called: its host gathers the round anew.

    `job` tells jobs and their restarts apart that have the same address and secret, one after the
    other; it has `wire.JOB_BYTES` bytes. The server closes `listener`.
    """

    def __init__(
        self,
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
        super().__init__(listener, 2 * len(ranks) + 64)
        self._rounds = rounds = Rounds(ranks, size, gathered, withdrawn)
        self._admission = Admission(rounds.ranks, size, secret, job, rounds.guests)
        # Refusals, the latest last, for those who wait for the rank that was refused.
        self._notes: deque[str] = deque(maxlen=NOTES)
        # Whether connections wait that could not be accepted, and whether that was logged.
        self._accept_later = self._full_is_logged = False

    # -- for whoever drives the server

    def handle(self) -> None:
        """Do all that can be done without waiting."""
        self.wait(0.0)

    def wait(self, seconds: float) -> None:
        """Sleep until there is something to do, at most `seconds`, and do it."""
        for descriptor, event in self._epoll.poll(max(0.0, min(seconds, SILENCE_SECONDS))):
            connection = self._connections.get(descriptor)
            if connection is not None:
                self._serve(connection, event)
            elif descriptor == self._listener.fileno():
                self._accept_later = True
        self._close_silent_strangers()
        if self._accept_later:
            self._accept_later = not self._accept_all()

    def deliver(self, key: Key, bodies: Sequence[bytes]) -> None:
        """Answer the round `key` with the bodies of its ranks in rank order; no-op if nobody waits.

        Without members in `key`, these are all ranks of the job.
        """
        self._rounds.deliver(key, bodies)

    def missing(self, key: Key | None = None) -> list[int]:
        """Return the ranks that `key` waits for; without a key, those that never came here."""
        return self._rounds.missing(key)

    def incomplete(self) -> dict[Key, list[int]]:
        """Return who waits in the rounds that were not passed to `gathered` yet."""
        return self._rounds.incomplete()

    def note_missing(self, members: tuple[int, ...], ranks: Sequence[int]) -> None:
        """Note which ranks of other hosts a meeting waits for, so that messages can name them."""
        self._rounds.missing_elsewhere[members] = list(ranks)

    def notes(self) -> list[str]:
        """Return sentences about the last connections that were refused."""
        return list(self._notes)

    def fail(self, text: str, rank: int | None = None) -> None:
        """Make every waiting rank raise `HorovodInternalError` with `text`; `rank` is at fault."""
        self._rounds.fail(text, rank)

    def finish(self, ranks: Collection[int]) -> None:
        """Note that the processes of `ranks` have ended with exit code 0, here or elsewhere.

        Ranks that wait for one of them, or will, raise `HorovodInternalError`.
        """
        self._rounds.finish(ranks)

    def give_up(self, text: str) -> None:
        """End all meetings before `close`: ranks that nobody has answered yet may meet elsewhere.

        The others raise `HorovodInternalError` with `text`.
        """
        self._rounds.give_up(text)

    def join(self, guest: Guest) -> None:
        """Let a rank of this process take part, without a connection."""
        self._rounds.present(guest)

    def give(self, guest: Guest, body: bytes) -> None:
        """Take the body of a guest for its next round."""
        self._rounds.give(guest, body)

    def presence(self, guest: Guest) -> Presence:
        """Return who has come to the round that `guest` waits in, and who has not."""
        key = Key(guest.members, max(0, guest.given - 1))
        rounds = self._rounds
        return Presence(
            rounds.missing(key), rounds.waiting(key), rounds.left(key), self.notes(),
            rounds.came_elsewhere(key),
        )  # fmt: skip

    def leave(self, guest: Guest) -> None:
        """Take a guest out of its meeting."""
        self._rounds.leave(guest)

    def close(self, drain_seconds: float = 0.0) -> None:
        """Stop to listen; close all connections when their ranks have left, or after a time.

        A connection that is closed with something unread would take back what was sent last.
        """
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(self._listener)
        self._listener.close()
        while self._strangers:  # They are for whoever listens here next.
            self._close(self._strangers[0])
        end = time.monotonic() + drain_seconds
        while self._rounds.guests and (left := end - time.monotonic()) > 0:
            if not any(isinstance(guest, Connection) for guest in self._rounds.guests.values()):
                break
            self.wait(left)
        self._close_all()

    # -- connections

    def _accept_all(self) -> bool:
        """Accept all connections that wait; return False where some have to wait on."""
        while self._listener.fileno() >= 0:
            try:
                self._accept()
            except BlockingIOError:
                break
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in EXHAUSTED or not self._strangers:
                    self._log_full(error)
                    return False
                self._close(self._strangers[0])
        return True

    def _log_full(self, error: OSError) -> None:
        if not self._full_is_logged:
            self._full_is_logged = True
            log.warning(
                "ranks that connect for their meeting have to wait (%s): this process has %d "
                "connections of ranks; `ulimit -n` allows more open files",
                error, len(self._connections),
            )  # fmt: skip

    def _serve(self, connection: Connection, event: int) -> None:
        if event & select.EPOLLOUT:
            connection.flush()
        if event & ~select.EPOLLOUT:
            data = connection.read()
            if data is None:
                return
            if not data:
                self._close(connection)
                return
            try:
                self._take(connection, data)
            except ProtocolError as error:
                self._note(f"a connection from {connection.peer_name()} was closed: {error}")
                self._close(connection)
                return
        if connection.ends and connection.idle:
            self._close(connection)

    def _take(self, connection: Connection, data: bytes) -> None:
        if connection.ends:
            return  # It was refused.
        if connection.rank < 0:
            rest = connection.complete_claim(data)
            if rest is None or not self._admit(connection):
                return
            data = rest
        for message in connection.frames.add(data):
            self._obey(connection, message)

    def _admit(self, connection: Connection) -> bool:
        """Answer the claim of a connection, which is complete; return whether it is accepted."""
        judgement = self._admission.judge(
            bytes(connection.claim), connection.nonce, connection.peer_name()
        )
        if judgement.note:
            self._note(judgement.note)
        if judgement.other_version is not None:
            self._rounds.note_other_version(*judgement.other_version)
        connection.rank = judgement.rank
        connection.ends = judgement.rank < 0
        if not connection.ends:
            self._strangers.remove(connection)
        connection.send(judgement.answer)
        return not connection.ends

    def _note(self, sentence: str) -> None:
        if sentence not in self._notes:
            log.debug("meeting: %s", sentence)
            self._notes.append(sentence)

    def _obey(self, connection: Connection, message: list[Any]) -> None:
        match message:
            case [wire.JOIN, [*members]] if self._is_part(members, connection.rank):
                if connection.given or connection.rank in self._rounds.guests:
                    raise ProtocolError(f"rank {connection.rank} joins twice")
                connection.members = tuple(members)
                self._rounds.present(connection)
            case [wire.GATHER, int(number), bytes(body)] if number == connection.given:
                if self._rounds.guests.get(connection.rank) is not connection:
                    raise ProtocolError(f"rank {connection.rank} has not joined")
                self._rounds.give(connection, body)
            case [wire.WHO]:
                connection.send(wire.pack_frame(wire.PRESENCE, *self.presence(connection)))
            case [wire.LEAVE]:
                self._rounds.leave(connection)
            case _:
                raise ProtocolError(f"rank {connection.rank} sent {str(message)[:80]}")

    def _is_part(self, members: list[Any], rank: int) -> bool:
        """Return whether `members` are ranks of the job, in any order, and `rank` is one."""
        known = all(isinstance(each, int) and 0 <= each < self._rounds.size for each in members)
        return not members or (known and rank in members and len(set(members)) == len(members))

    def _close(self, connection: Connection) -> bool:
        closes = super()._close(connection)
        if closes:
            self._rounds.leave(connection)
        return closes
