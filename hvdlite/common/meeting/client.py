"""A rank's side of a meeting that a server runs.

Until the first answer, everything may be late: the host's name, the server, the other ranks, and
the end of an earlier meeting at the same address. So the rank tries again until its deadline, and
says what it waits for. What can never come right ends the wait at once.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

from hvdlite.common.base.errors import HorovodInternalError, ProtocolError
from hvdlite.common.connections.address import Address
from hvdlite.common.meeting import wire
from hvdlite.common.meeting.dial import Refused, dial
from hvdlite.common.meeting.participant import Participant
from hvdlite.common.meeting.patience import Patience, Presence

ATTEMPT_SECONDS = 5.0  # The longest time for one connection and its handshake.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.01, 0.5  # Between two attempts.
DUPLICATE_SECONDS = 3.0  # How long the end of an earlier process of this rank may take.
ANSWER_SECONDS = 2.0  # How long the server may take to say who is missing.


class ServerExchange:
    """The exchange of `me` at the server that listens at one of `addresses`; see `Exchange`.

    Raises `HorovodInternalError` when the server cannot be reached or refuses this rank, and
    `HorovodVersionMismatchError`.
    """

    def __init__(self, addresses: Sequence[Address], me: Participant) -> None:
        self.rank, self.size = me.place
        self._me, self._addresses = me, addresses
        self._patience = Patience(me.rank, me.size, me.deadline)
        self._frames = wire.answers(me.size)
        self._round = 0
        self._connection: socket.socket | None = None
        self._connect()

    # -- rounds

    def allgather(self, body: bytes) -> list[bytes]:
        """See `Exchange.allgather`."""
        wire.check_body(body)
        while True:
            try:
                return self._allgather(body)
            except ConnectionError as error:
                if self._round:
                    raise HorovodInternalError(
                        f"the server of the meeting at {self._where()} ended while the ranks of "
                        f"this job connected ({error})"
                    ) from error
                # Nobody has answered yet: the server was that of an earlier meeting or attempt.
                self._connect(str(error))

    def _allgather(self, body: bytes) -> list[bytes]:
        self._send(wire.GATHER, self._round, bytes(body))
        for message in self._messages():
            match message:
                case [wire.BODIES, int(number), [*bodies]] if number == self._round:
                    self._round += 1
                    return bodies
                case [wire.PRESENCE, *presence]:
                    self._wait_for(Presence(*presence))
                case [wire.FAIL, str(text), rank]:
                    raise HorovodInternalError(text, rank)
                case [wire.OTHER_HVDLITE, int(), str(version)]:
                    raise wire.mismatch(version)
                case [wire.GIVE_UP, str(text)]:
                    raise ConnectionError(text)
                case _:
                    raise ProtocolError(f"the server of the meeting sent {str(message)[:80]}")
        raise AssertionError("the messages of a server do not end")

    def _wait_for(self, presence: Presence) -> None:
        """Log who is missing; raise the error of a rank that has waited for too long."""
        if self._patience.over:
            raise self._patience.error(presence.spell())
        if self._me.rank == presence.speaker:
            self._patience.log(presence.spell())

    def _messages(self) -> Iterator[list[Any]]:
        """Yield the server's messages; ask who is missing now and then, and at the deadline."""
        assert self._connection is not None
        patience, asked_at = self._patience, None
        poller = select.poll()  # select() knows no descriptor above 1023.
        poller.register(self._connection, select.POLLIN)
        while True:
            seconds = ANSWER_SECONDS if patience.over else patience.seconds()
            if poller.poll(seconds * 1000):
                data = self._connection.recv(1 << 16)
                if not data:
                    raise ConnectionError("end of file")
                yield from self._frames.add(data)
            elif asked_at is not None and time.monotonic() >= asked_at + ANSWER_SECONDS:
                raise patience.error(f"the server at {self._where()} does not answer any more")
            if asked_at is None and patience.over:
                asked_at = time.monotonic()
                self._send(wire.WHO)
            elif patience.line_is_due():
                self._send(wire.WHO)

    def _send(self, *message: Any) -> None:
        assert self._connection is not None
        self._connection.settimeout(max(ANSWER_SECONDS, self._patience.seconds()))
        try:
            self._connection.sendall(wire.pack_frame(*message))
        except TimeoutError:
            raise ConnectionError("the server does not read") from None

    def close(self) -> None:
        """See `Exchange.close`."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._send(wire.LEAVE)
            self._connection.close()
            self._connection = None

    # -- the connection

    def _where(self) -> str:
        return " or ".join(map(str, self._addresses))

    def _connect(self, before: str = "") -> None:
        """Connect to the server, and prove who we are; retry what may come right.

        `before` is why the server ended to which this rank was connected before.
        """
        self._hang_up()
        patience, began, pause = self._patience, time.monotonic(), FIRST_PAUSE_SECONDS
        for address in cycle(self._addresses):
            try:
                self._connection = self._attempt(address)
                self._frames = wire.Frames(self._frames.limit)
                self._send(wire.JOIN, list(self._me.members or ()))
                return
            except (OSError, ProtocolError, Refused) as error:
                if isinstance(error, Refused):
                    self._check(error, time.monotonic() - began)
                who = f"the server of the meeting at {address} cannot be reached ({error})"
                who += self._me.likely_cause(error)
                who += f"; it has ended before: {before}" * bool(before)
                self._hang_up()
            if patience.over:
                raise patience.error(who)
            if patience.line_is_due():
                patience.log(who)
            if address == self._addresses[-1]:
                time.sleep(min(pause, patience.seconds()))
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _check(self, refused: Refused, seconds: float) -> None:
        """Raise the error that ends the wait; return where another attempt may go well."""
        if refused.reply == wire.OTHER_JOB:
            return
        if refused.reply == wire.OTHER_SECRET and len(self._addresses) > 1:
            return
        if refused.reply == wire.DUPLICATE and seconds < DUPLICATE_SECONDS:
            return
        raise HorovodInternalError(
            f"the server of the meeting at {self._where()} refuses this rank: {refused}",
            self._me.rank,
        )

    def _attempt(self, address: Address) -> socket.socket:
        """Return a connection over which both ends have proven that they know the secret."""
        seconds = max(0.1, min(ATTEMPT_SECONDS, self._patience.deadline_seconds()))
        return dial(address, self._me, time.monotonic() + seconds)

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
