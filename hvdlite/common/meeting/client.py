"""A rank's side of a meeting that a server runs.

Until the first answer, everything may be late: the host's name, the server, the other ranks, and
the end of an earlier meeting at the same address. So the rank tries again until its deadline, and
says what it waits for. What can never come right ends the wait at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hvdlite.common.base.errors import (
    HorovodInternalError,
    HorovodVersionMismatchError,
    ProtocolError,
)
from hvdlite.common.connections import prove
from hvdlite.common.connections.address import Address
from hvdlite.common.connections.dial import Failure, Limits, Refused, reach
from hvdlite.common.connections.link import Link
from hvdlite.common.connections.loop import Loop
from hvdlite.common.meeting import wire
from hvdlite.common.meeting.start_wait import Presence, StartWait

ATTEMPT_SECONDS = 5.0  # The longest time for one connection and its handshake.
DUPLICATE_SECONDS = 3.0  # How long the end of an earlier process of this rank may take.
ANSWER_SECONDS = 2.0  # How long the server may take to say who is missing.


@dataclass(frozen=True)
class Participant:
    """World rank `rank` of a job of `size` ranks, which waits until `deadline` (monotonic seconds).

    `members` are the world ranks that meet, in the order of their new numbers; None is all of
    `size`. `secret` and `job` are those of the server. `served_by` says which rank serves, and
    which variable says where, in a few words; it is empty where another program serves.
    """

    rank: int
    size: int
    secret: bytes
    deadline: float
    members: Sequence[int] | None = None
    job: bytes = bytes(wire.JOB_BYTES)
    served_by: str = ""

    @property
    def place(self) -> tuple[int, int]:
        """The number of this rank among those that meet, and how many they are."""
        if self.members is None:
            return self.rank, self.size
        return self.members.index(self.rank), len(self.members)

    def likely_cause(self, error: Exception) -> str:
        """Return a clause about why the server cannot be reached; empty where nothing is known."""
        if isinstance(error, ConnectionRefusedError) and self.served_by:
            return f": {self.served_by}, and has not started, or has not called init() yet"
        if isinstance(error, TimeoutError):
            return ": another program may own the port, or a firewall may be between"
        return ""


class ServerExchange:
    """The exchange of `me` at the server that listens at one of `addresses`; see `Exchange`.

    Raises `HorovodInternalError` when the server cannot be reached or refuses this rank, and
    `HorovodVersionMismatchError`.
    """

    def __init__(self, addresses: Sequence[Address], me: Participant) -> None:
        self.rank, self.size = me.place
        self._me, self._addresses = me, addresses
        self._wait = StartWait(me.rank, me.size, me.deadline)
        self._round = 0
        self._loop = Loop()
        self._link: Link | None = None
        self._inbox: deque[list[Any]] = deque()
        self._lost: str | None = None  # Why the link has ended.
        try:
            self._connect()
        except BaseException:
            self._loop.close()
            raise

    # -- rounds

    def allgather(self, body: bytes) -> list[bytes]:
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
                    self._wait.tell(Presence(*presence))
                case [wire.FAIL, str(text), rank]:
                    raise HorovodInternalError(text, rank)
                case [wire.OTHER_HVDLITE, int(), str(version)]:
                    raise wire.mismatch(version)
                case [wire.GIVE_UP, str(text)]:
                    raise ConnectionError(text)
                case _:
                    raise ProtocolError(f"the server of the meeting sent {str(message)[:80]}")
        raise AssertionError("the messages of a server do not end")

    def _messages(self) -> Iterator[list[Any]]:
        """Yield the server's messages; ask who is missing now and then, and at the deadline."""
        wait, asked_at = self._wait, None
        while True:
            while self._inbox:
                yield self._inbox.popleft()
            if self._lost is not None:
                raise ConnectionError(self._lost or "end of file")
            heard = self._loop.run_once(ANSWER_SECONDS if wait.over else wait.seconds())
            if not heard and asked_at is not None and time.monotonic() >= asked_at + ANSWER_SECONDS:
                raise wait.error(f"the server at {self._where()} does not answer any more")
            if asked_at is None and wait.over:
                asked_at = time.monotonic()
                self._send(wire.WHO)
            elif wait.line_is_due():
                self._send(wire.WHO)

    def _send(self, *message: Any) -> None:
        assert self._link is not None
        self._link.send(*message)

    def close(self) -> None:
        if self._link is not None:
            self._send(wire.LEAVE)
            self._link.close()
            self._link = None
        self._loop.close()

    # -- the connection

    def _where(self) -> str:
        return " or ".join(map(str, self._addresses))

    def _connect(self, before: str = "") -> None:
        """Connect to the server, and prove who we are; retry what may come right.

        `before` is why the server ended to which this rank was connected before.
        """
        if self._link is not None:
            self._link.close()
            self._link = None
        wait, began, me = self._wait, time.monotonic(), self._me

        def limits() -> Limits:
            seconds = max(0.1, min(ATTEMPT_SECONDS, wait.deadline - time.monotonic()))
            return Limits(seconds, seconds)

        def failed(failures: list[Failure]) -> None:
            for failure in failures:
                self._check(failure.error, time.monotonic() - began)
            if not any(map(Address.may_be_served, self._addresses)):
                raise HorovodInternalError(
                    f"nobody serves the meeting of rank {me.rank} at {self._where()} any more: "
                    "hvdlite-run, which has started this rank, has ended with its job",
                    me.rank,
                )
            error = failures[-1].error
            who = f"the server of the meeting at {self._where()} cannot be reached ({error})"
            who += me.likely_cause(error)
            who += f"; it has ended before: {before}" * bool(before)
            if wait.over:
                raise wait.error(who)
            if wait.line_is_due():
                wait.log(who)

        party = prove.Party(me.secret, wire.RANK, wire.SERVER)
        claim = wire.Claim(me.rank, me.size, me.job).pack()
        connection = reach(self._loop, self._addresses, party, claim, limits, failed)
        self._inbox.clear()
        self._lost = None
        self._link = Link(
            self._loop, connection, received=lambda message, arrays: self._inbox.append(message),
            ended=self._on_ended, most_bytes=wire.longest_answer(me.size),
        )  # fmt: skip
        self._send(wire.JOIN, list(me.members or ()))

    def _on_ended(self, reason: str) -> None:
        self._lost = reason

    def _check(self, error: Exception, seconds: float) -> None:
        """Raise the error that ends the wait; return where another attempt may go well."""
        if isinstance(error, HorovodVersionMismatchError):
            raise error
        if not isinstance(error, Refused) or error.code == wire.OTHER_JOB:
            return
        if error.code == prove.OTHER_SECRET and len(self._addresses) > 1:
            return
        if error.code == wire.DUPLICATE and seconds < DUPLICATE_SECONDS:
            return
        raise HorovodInternalError(
            f"the server of the meeting at {self._where()} refuses this rank: {error}",
            self._me.rank,
        )
