"""The server of a meeting: it answers each round when all of its ranks have given their body.

The server is driven by events and starts no thread: whoever has one waits until `fileno` is
readable, by a selector of its own, and calls `handle`, which never blocks. A connection is a
stranger's until its claim is proven; strangers are dropped when they are silent, and when there are
too many of them. A rank that is refused is told why, and the others go on.
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
from hvdlite.common.meeting import wire
from hvdlite.common.meeting.handshake import CONNECTS, new_nonce, proves
from hvdlite.common.meeting.patience import Presence, spell_ranks
from hvdlite.common.meeting.rounds import Gathered, Guest, Key, Rounds, Withdrawn
from hvdlite.common.plain.messages import PROTOCOL_VERSION

SILENCE_SECONDS = 5.0  # A stranger that has not proven its claim after this time is dropped.
NOTES = 8  # The most refusals that are remembered for those who wait.
READ_BYTES = 1 << 16

log = logging.getLogger("hvdlite")


class _Connection:
    """One accepted connection: a stranger at first, then the guest `rank`."""

    def __init__(self, server: MeetingServer, connection: socket.socket) -> None:
        self.socket = connection
        self.accepted_at = time.monotonic()
        self.nonce = new_nonce()
        self.claim = bytearray()
        self.frames = wire.Frames(wire.FRAME_BYTES)
        self.ends = False  # Whether the connection is closed as soon as all is sent.
        self.rank = -1
        self.members: tuple[int, ...] = ()
        self.given = 0
        self._server = server
        self._outbox: deque[memoryview] = deque()

    def send(self, frame: bytes) -> None:
        """See `Guest.send`."""
        self._outbox.append(memoryview(frame))
        self.flush()

    def flush(self) -> None:
        """Send what fits into the socket, and have the rest sent when there is room."""
        try:
            while self._outbox:
                sent = self.socket.send(self._outbox[0])
                if sent == len(self._outbox[0]):
                    self._outbox.popleft()
                else:
                    self._outbox[0] = self._outbox[0][sent:]
        except BlockingIOError:
            pass
        except OSError:  # Reading tells of the end of the connection.
            self._outbox.clear()
        self._server.expect(self, room=bool(self._outbox))

    @property
    def idle(self) -> bool:
        """Whether all is sent."""
        return not self._outbox


class MeetingServer:
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
        self._rounds = Rounds(
            ranks, size, gathered or self._deliver_all, withdrawn or (lambda _: None)
        )
        self._secret, self._job, self._size = secret, job, size
        # Refusals, the latest last, for those who wait for the rank that was refused.
        self._notes: deque[str] = deque(maxlen=NOTES)
        self._connections: dict[int, _Connection] = {}
        self._strangers: deque[_Connection] = deque()  # In the order of their arrival.
        self._most_strangers = 2 * len(ranks) + 64
        self._listener = listener
        listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(listener, select.EPOLLIN)

    # -- for whoever drives the server

    def fileno(self) -> int:
        """Return the descriptor that is readable when `handle` has something to do."""
        return self._epoll.fileno()

    def handle(self) -> None:
        """Do all that can be done without waiting."""
        for descriptor, event in self._epoll.poll(0):
            connection = self._connections.get(descriptor)
            if connection is not None:
                self._serve(connection, event)
            elif descriptor == self._listener.fileno():
                self._accept()
        oldest = time.monotonic() - SILENCE_SECONDS
        while self._strangers and self._strangers[0].accepted_at < oldest:
            self._close(self._strangers.popleft())

    def wait(self, seconds: float) -> None:
        """Sleep until there is something to do, at most `seconds`, and do it."""
        self._epoll.poll(max(0.0, min(seconds, SILENCE_SECONDS)), maxevents=1)
        self.handle()

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
        return Presence(rounds.missing(key), rounds.waiting(key), rounds.left(key), self.notes())

    def leave(self, guest: Guest) -> None:
        """Take a guest out of its meeting."""
        self._rounds.leave(guest)

    def close(self, drain_seconds: float = 0.0) -> None:
        """Stop to listen; close all connections when their ranks have left, or after a time.

        A connection that is closed with something unread would take back what was sent last.
        """
        self._unregister(self._listener)
        self._listener.close()
        end = time.monotonic() + drain_seconds
        while self._rounds.guests and (left := end - time.monotonic()) > 0:
            if not any(isinstance(guest, _Connection) for guest in self._rounds.guests.values()):
                break
            self.wait(left)
        for connection in list(self._connections.values()):
            self._close(connection)
        self._epoll.close()

    def after_fork_in_child(self) -> None:
        """Close this process's copies of all descriptors."""
        self._epoll.close()
        self._listener.close()
        for connection in self._connections.values():
            connection.socket.close()

    # -- connections

    def expect(self, connection: _Connection, *, room: bool) -> None:
        """Wait for input, and with `room` also for room for output."""
        if connection.socket.fileno() in self._connections:
            self._epoll.modify(connection.socket, select.EPOLLIN | select.EPOLLOUT * room)

    def _accept(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # It was reset, or there are too many open files.
                log.debug("a connection to the meeting could not be accepted: %s", error)
                if self._strangers:
                    self._close(self._strangers.popleft())
                return
            accepted.setblocking(False)
            if accepted.family != socket.AF_UNIX:
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(self, accepted)
            self._connections[accepted.fileno()] = connection
            self._strangers.append(connection)
            self._epoll.register(accepted, select.EPOLLIN)
            connection.send(wire.pack_greeting(connection.nonce))
            if len(self._strangers) > self._most_strangers:
                self._close(self._strangers.popleft())

    def _serve(self, connection: _Connection, event: int) -> None:
        if event & select.EPOLLOUT:
            connection.flush()
        if event & ~select.EPOLLOUT:
            data = self._read(connection)
            if data is None:
                return
            if not data:
                self._close(connection)
                return
            try:
                self._take(connection, data)
            except ProtocolError as error:
                self._note(f"a connection from {_name(connection.socket)} was closed: {error}")
                self._close(connection)
                return
        if connection.ends and connection.idle:
            self._close(connection)

    @staticmethod
    def _read(connection: _Connection) -> bytes | None:
        """Return what has arrived; empty at the end of the connection, None where nothing has."""
        try:
            return connection.socket.recv(READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _take(self, connection: _Connection, data: bytes) -> None:
        if connection.ends:
            return  # It was refused.
        if connection.rank < 0:
            room = wire.CLAIM_BYTES - len(connection.claim)
            connection.claim += data[:room]
            data = data[room:]
            if not wire.MAGIC.startswith(connection.claim[: len(wire.MAGIC)]):
                raise ProtocolError(f"it says {bytes(connection.claim[:8])!r}")
            if len(connection.claim) < wire.CLAIM_BYTES:
                return
            self._judge(connection)
            if connection.rank < 0:
                return
        for message in connection.frames.add(data):
            self._obey(connection, message)

    def _judge(self, connection: _Connection) -> None:
        """Accept or refuse the rank whose claim is complete."""
        raw, given = (
            bytes(connection.claim[: wire.CLAIM.size]),
            bytes(connection.claim[wire.CLAIM.size :]),
        )
        claim = wire.unpack_claim(raw)
        nonces = connection.nonce + claim.nonce
        if not proves(given, self._secret, CONNECTS, nonces, raw):
            self._refuse(
                connection, wire.OTHER_SECRET, f"a process at {_name(connection.socket)}",
                "has another secret: HVDLITE_SECRET must be the same for all ranks of a job",
            )  # fmt: skip
            return
        refusal = self._refusal(claim)
        if refusal is not None:
            self._refuse(connection, refusal[0], f"rank {claim.rank}", refusal[1])
            return
        self._strangers.remove(connection)
        connection.rank = claim.rank
        connection.send(wire.pack_acceptance(self._secret, nonces, raw))

    def _refusal(self, claim: wire.Claim) -> tuple[int, str] | None:
        """Return why a rank that has the secret may not take part, as a reply and its reason."""
        if claim.protocol != PROTOCOL_VERSION:
            return wire.OTHER_VERSION, (
                f"runs hvdlite {claim.version} (protocol {claim.protocol}), "
                f"and this job has protocol {PROTOCOL_VERSION}"
            )
        if claim.job != self._job:
            return wire.OTHER_JOB, "is of another job, or of another start of this one"
        if claim.size != self._size:
            return wire.REFUSED, (
                f"counts {claim.size} ranks in the job, and the rank or launcher that serves the "
                f"meeting counts {self._size}"
            )
        if claim.rank not in self._rounds.ranks:
            return (
                wire.REFUSED,
                f"does not meet here: the ranks here are {spell_ranks(self._rounds.ranks)}",
            )
        if claim.rank in self._rounds.guests:
            return wire.DUPLICATE, "is here already: two processes have the same rank"
        return None

    def _refuse(self, connection: _Connection, reply: int, who: str, reason: str) -> None:
        if reply not in (wire.OTHER_JOB, wire.DUPLICATE):
            self._note(f"{who} {reason}")
        connection.ends = True
        connection.send(wire.pack_refusal(reply, f"{who} {reason}"))

    def _note(self, sentence: str) -> None:
        if sentence not in self._notes:
            log.debug("meeting: %s", sentence)
            self._notes.append(sentence)

    def _obey(self, connection: _Connection, message: list[Any]) -> None:
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
        known = all(isinstance(each, int) and 0 <= each < self._size for each in members)
        return not members or (known and rank in members and len(set(members)) == len(members))

    def _close(self, connection: _Connection) -> None:
        with contextlib.suppress(ValueError):
            self._strangers.remove(connection)
        if self._connections.pop(connection.socket.fileno(), None) is None:
            return
        self._unregister(connection.socket)
        connection.socket.close()
        self._rounds.leave(connection)

    def _unregister(self, closing: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(closing)

    def _deliver_all(self, key: Key, bodies: dict[int, bytes]) -> None:
        members = key.members or range(self._size)
        self._rounds.deliver(key, [bodies[rank] for rank in members])


def _name(connection: socket.socket) -> str:
    try:
        peer = connection.getpeername()
    except OSError:
        return "an unknown address"
    return str(peer[0]) if isinstance(peer, tuple) else "this host"


__all__ = ["Key", "MeetingServer"]
