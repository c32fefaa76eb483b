"""Connect a worker to the driver of its job, and prove to each other that both are of the job."""

from __future__ import annotations

import socket
import time

from hvdlite.common.base.errors import (
    HorovodInternalError,
    HorovodVersionMismatchError,
    ProtocolError,
)
from hvdlite.common.meeting import wire
from hvdlite.common.meeting.address import Address, connect
from hvdlite.common.meeting.handshake import CONNECTS, LISTENS, new_nonce, proof, proves
from hvdlite.common.membership.frames import CLAIM_JOB

CONNECT_SECONDS = 30.0  # The driver listens before it starts its first worker.
PAUSE_SECONDS = 0.05  # Between two attempts.


def dial(address: Address, number: int, secret: bytes) -> socket.socket:
    """Return the connection of worker `number` to the driver at `address`; it does not block.

    Raises `HorovodInternalError` when the driver cannot be reached or refuses this worker, and
    `HorovodVersionMismatchError`.
    """
    end = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            connection = _attempt(address, number, secret, end)
        except (OSError, ProtocolError) as error:
            if time.monotonic() > end or isinstance(error, (FileNotFoundError, ProtocolError)):
                raise HorovodInternalError(
                    f"worker {number} cannot reach the driver of the job at {address} ({error}): "
                    "it has ended, or HVDLITE_ELASTIC_DRIVER is that of another job"
                ) from error
            time.sleep(PAUSE_SECONDS)
        else:
            connection.setblocking(False)
            return connection


def _attempt(address: Address, number: int, secret: bytes, end: float) -> socket.socket:
    connection = connect(address, max(0.1, end - time.monotonic()))
    try:
        greeting = wire.unpack_greeting(_read(connection, wire.GREETING.size, end))
        nonce = new_nonce()
        nonces = greeting.nonce + nonce
        claim = wire.pack_claim(CLAIM_JOB, number, 0, nonce)
        connection.sendall(claim + proof(secret, CONNECTS, nonces, claim))
        reply, length = wire.REPLY.unpack(_read(connection, wire.REPLY.size, end))
        rest = _read(connection, min(length, wire.SENTENCE_BYTES), end)
        if reply == wire.OTHER_VERSION:
            own = wire.unpack_claim(claim).spell()
            raise HorovodVersionMismatchError("hvdlite", greeting.spell(), own)
        if reply != wire.ACCEPTED:
            text = rest.decode(errors="replace")
            raise HorovodInternalError(f"the driver of the job at {address} refuses: {text}")
        if not proves(rest, secret, LISTENS, nonces, claim):
            raise ProtocolError("the program there does not know the secret of this job")
    except BaseException:
        connection.close()
        raise
    return connection


def _read(connection: socket.socket, length: int, end: float) -> bytes:
    """Return exactly `length` bytes, read before `end`. Raises `OSError`."""
    data = bytearray()
    while len(data) < length:
        connection.settimeout(max(0.001, end - time.monotonic()))
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("it closed the connection")
        data += part
    return bytes(data)
