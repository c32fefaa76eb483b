"""The driver's side of the connections to the workers of an elastic job.

Strangers connect, too: see meeting/doorway.py.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.meeting import wire
from hvdlite.common.meeting.connection import Connection
from hvdlite.common.meeting.doorway import Doorway
from hvdlite.common.meeting.handshake import CONNECTS, proves
from hvdlite.common.membership import frames
from hvdlite.common.plain.messages import PROTOCOL_VERSION

MOST_STRANGERS = 256  # The oldest is dropped when another one comes.

Said = Callable[[int, list[Any]], None]
Ended = Callable[[int], None]

log = logging.getLogger("hvdlite")


class WorkerServer(Doorway):
    """The connections of the workers that dial `listener`, which the server closes.

    ``said(number, message)`` is called with each message of a worker but its BEATs, and
    ``ended(number)`` when the connection of a worker has ended. ``expects(number)`` says which
    workers may connect; by default all may that know the secret, each once at a time.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        said: Said,
        ended: Ended,
        *,
        expects: Callable[[int], bool] = lambda number: True,
    ) -> None:
        super().__init__(listener, MOST_STRANGERS)
        self._secret, self._said, self._ended, self._expects = secret, said, ended, expects
        self._workers: dict[int, Connection] = {}  # By number.
        self._heard_at: dict[int, float] = {}  # By number: when something came last.

    # -- for whoever drives the server

    def handle(self) -> None:
        """Do all that can be done without waiting."""
        for descriptor, events in self._epoll.poll(0):
            connection = self._connections.get(descriptor)
            if connection is not None:
                self._serve(connection, events)
        self._accept_all()
        self._close_silent_strangers()

    def send(self, number: int, message: Sequence[Any]) -> None:
        """Send a message to a worker; never blocks. Without effect where it is not connected."""
        worker = self._workers.get(number)
        if worker is not None:
            worker.send(wire.pack_frame(*message))

    def numbers(self) -> list[int]:
        """Return the workers that are connected."""
        return list(self._workers)

    def silence(self) -> dict[int, float]:
        """Return for how many seconds each worker has sent nothing; a BEAT is due every second."""
        now = time.monotonic()
        return {number: now - self._heard_at[number] for number in self._workers}

    def drop(self, number: int) -> None:
        """Close the connection of a worker as soon as all is sent; `ended` is not called."""
        worker = self._workers.pop(number, None)
        self._heard_at.pop(number, None)
        if worker is not None:
            worker.rank, worker.ends = -1, True
            if worker.idle:
                self._close(worker)

    def close(self) -> None:
        """Stop to listen, and close all connections; `ended` is not called."""
        self._listener.close()
        self._workers.clear()
        self._close_all()

    # -- connections

    def _accept_all(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                self._accept()
            except OSError:  # There is none, it was reset, or no descriptor is left.
                return

    def _serve(self, connection: Connection, events: int) -> None:
        if events & select.EPOLLOUT:
            connection.flush()
        if events & ~select.EPOLLOUT:
            data = connection.read()
            try:
                if data:
                    self._take(connection, data)
            except ProtocolError as error:
                who = connection.peer_name() if connection.rank < 0 else f"worker {connection.rank}"
                log.warning("a connection from %s was closed: %s", who, error)
                data = b""
            if data == b"":
                self._close(connection)
        if connection.ends and connection.idle:
            self._close(connection)

    def _take(self, connection: Connection, data: bytes) -> None:
        if connection.ends:
            return
        if connection.rank < 0:
            rest = connection.complete_claim(data)
            if rest is None or not self._admit(connection):
                return
            data = rest
        self._heard_at[connection.rank] = time.monotonic()
        for message in connection.frames.add(data):
            if not frames.is_from_worker(message):
                raise ProtocolError(f"it sent {str(message)[:80]}")
            if message[0] != frames.BEAT and connection.rank >= 0:
                self._said(connection.rank, message)

    def _admit(self, connection: Connection) -> bool:
        """Accept or refuse the worker whose claim is complete; return whether it is accepted."""
        raw = bytes(connection.claim[: wire.CLAIM.size])
        given = bytes(connection.claim[wire.CLAIM.size :])
        claim = wire.unpack_claim(raw)
        nonces = connection.nonce + claim.nonce
        if not proves(given, self._secret, CONNECTS, nonces, raw):
            refusal = wire.OTHER_SECRET, "this process has another HVDLITE_SECRET than the job"
        else:
            refusal = self._judge(claim)
        if refusal[0] != wire.ACCEPTED:
            log.debug("a worker was refused: %s", refusal[1])
            connection.ends = True
            connection.send(wire.pack_refusal(*refusal))
            return False
        self._strangers.remove(connection)
        connection.rank = claim.rank
        self._workers[claim.rank] = connection
        connection.send(wire.pack_acceptance(self._secret, nonces, raw))
        return True

    def _judge(self, claim: wire.Claim) -> tuple[int, str]:
        """Return the reply to a worker that has the secret, and the reason of a refusal."""
        if claim.protocol != PROTOCOL_VERSION:
            return wire.OTHER_VERSION, (
                f"worker {claim.rank} runs hvdlite {claim.version} (protocol {claim.protocol}), "
                f"and this job has protocol {PROTOCOL_VERSION}"
            )
        if claim.job != frames.CLAIM_JOB:
            return wire.OTHER_JOB, "no meeting is served here: this is the driver of a job"
        if claim.rank in self._workers:
            return wire.DUPLICATE, f"worker {claim.rank} is connected already"
        if not self._expects(claim.rank):
            return wire.REFUSED, f"worker {claim.rank} was given up, or is of another job"
        return wire.ACCEPTED, ""

    def _close(self, connection: Connection) -> bool:
        if not super()._close(connection):
            return False
        if self._workers.get(connection.rank) is connection:
            del self._workers[connection.rank], self._heard_at[connection.rank]
            self._ended(connection.rank)
        return True
