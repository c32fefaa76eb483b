"""Connect to a server, and prove to each other that both ends are of the job."""

from __future__ import annotations

import socket
import time

from hvdlite.common.base.errors import HorovodVersionMismatchError
from hvdlite.common.connections.address import Address, connect
from hvdlite.common.meeting import handshake, wire
from hvdlite.common.meeting.participant import Participant


class Refused(Exception):  # noqa: N818 - not an error yet
    """The server does not let this participant take part; `reply` is one of wire.py."""

    def __init__(self, reply: int, sentence: str) -> None:
        super().__init__(sentence)
        self.reply = reply


def dial(address: Address, me: Participant, end: float) -> socket.socket:
    """Return a connection over which both ends have proven that they know the secret.

    Gives up at `end` (monotonic seconds). Raises `OSError`, `ProtocolError` where another program
    answers, `Refused`, and `HorovodVersionMismatchError`.
    """
    connection = connect(address, max(0.001, end - time.monotonic()))
    try:
        greeting = wire.unpack_greeting(_read(connection, wire.GREETING.size, end))
        nonce = handshake.new_nonce()
        nonces = greeting.nonce + nonce
        claim = wire.pack_claim(me.job, me.rank, me.size, nonce)
        connection.sendall(claim + handshake.proof(me.secret, handshake.CONNECTS, nonces, claim))
        reply, length = wire.REPLY.unpack(_read(connection, wire.REPLY.size, end))
        rest = _read(connection, min(length, wire.SENTENCE_BYTES), end)
        if reply == wire.OTHER_VERSION:
            raise HorovodVersionMismatchError(
                "hvdlite", greeting.spell(), wire.unpack_claim(claim).spell()
            )
        if reply != wire.ACCEPTED:
            raise Refused(reply, rest.decode(errors="replace"))
        if not handshake.proves(rest, me.secret, handshake.LISTENS, nonces, claim):
            raise Refused(wire.OTHER_SECRET, "the server does not know the secret of this job")
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
