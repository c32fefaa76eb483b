"""Connections whose other end has not proved yet who it is, and what both ends have to prove.

    listening end                     connecting end
                  <-  TCP or Unix  --
    nonce         ---------------->
                  <----------------  nonce, claim, proof       (meeting/handshake.py)
    proof         ---------------->
                  <----------------  GO                        on the one attempt that is used

Every step has a fixed length, and nothing is parsed before the proof holds.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.connections.loop import READ, Loop
from hvdlite.common.connections.strangers import CLOSED, RESETS, why
from hvdlite.common.plain.messages import PROTOCOL_VERSION

CLAIM = struct.Struct("<8sIQIIBB")  # MAGIC, protocol, epoch, from rank, to rank, channel, stream.
MAGIC = b"hvdlite\n"
GO = b"g"
# The channels. Off the control tree, the sender of a message dials a connection for itself.
CONTROL, CONTROL_ONE_WAY, DATA = 0, 1, 2
MOST_STREAMS = 16  # Of data between two ranks.


class OtherEpochError(ProtocolError):
    """A rank of this job has proved itself that has not left an earlier world, or is ahead."""


class Slot(NamedTuple):
    """Which connection between two ranks is meant, as one of them sees it."""

    rank: int  # The other one.
    channel: int
    stream: int = 0


class Identity(NamedTuple):
    """What this rank proves, and demands of the others."""

    rank: int
    size: int
    epoch: int
    key: bytes

    def claim(self, slot: Slot) -> bytes:
        """Return what this rank says when it dials."""
        names = (self.rank, slot.rank, slot.channel, slot.stream)
        return CLAIM.pack(MAGIC, PROTOCOL_VERSION, self.epoch, *names)

    def read(self, claim: bytes) -> Slot:
        """Return what a peer dials for, whose proof holds.

        Raises `ProtocolError` unless it means this rank, and `OtherEpochError`.
        """
        magic, protocol, epoch, sender, receiver, channel, stream = CLAIM.unpack(claim)
        if (magic, protocol) == (MAGIC, PROTOCOL_VERSION) and epoch != self.epoch:
            raise OtherEpochError(
                f"rank {sender} connects in epoch {epoch} of this job, rank {self.rank} is in "
                f"epoch {self.epoch}",
                sender,
            )
        known = (magic, protocol, receiver) == (MAGIC, PROTOCOL_VERSION, self.rank)
        if not known or sender == self.rank or sender >= self.size:
            raise ProtocolError("it means another rank")
        if channel > DATA or stream >= MOST_STREAMS:
            raise ProtocolError("it means a connection that there is not")
        return Slot(sender, channel, stream)


class Stranger:
    """One such connection. Reads exactly the bytes that are due; closes when they do not come."""

    def __init__(self, poller: Loop, connection: socket.socket) -> None:
        self.connection = connection
        self._poller = poller
        self._body = b""
        self._due = 0
        self._step: Callable[[bytes], None]
        self.pending = True  # Until it is closed, or released to be used.

    def ended(self, reason: str, *, reset: bool = False) -> None:
        """Close the connection, because of `reason`. Called at most once.

        `reset` tells that the other end has reset it: one that has to make room for others does.
        """
        self.close()

    def expect(self, nbytes: int, step: Callable[[bytes], None]) -> None:
        """Call `step` with the next `nbytes`."""
        self._body, self._due, self._step = b"", nbytes, step
        self._poller.watch(self.connection.fileno(), READ, self._read)

    def _read(self, events: int) -> None:
        try:
            part = self.connection.recv(self._due - len(self._body))
        except BlockingIOError:
            return
        except OSError as error:
            self.ended(why(error), reset=error.errno in RESETS)
            return
        if not part:
            self.ended(CLOSED)
            return
        self._body += part
        if len(self._body) == self._due:
            self._step(self._body)

    def say(self, body: bytes) -> bool:
        """Send the few bytes of a step; return whether they were accepted."""
        try:
            if self.connection.send(body, socket.MSG_NOSIGNAL) == len(body):
                return True
            self.ended("it accepts no data")  # The buffer of a new connection holds all steps.
        except OSError as error:
            self.ended(why(error), reset=error.errno in RESETS)
        return False

    def release(self) -> socket.socket:
        """Return the connection, which is not watched any more."""
        self.pending = False
        self._poller.forget(self.connection.fileno())
        return self.connection

    def close(self) -> None:
        """Close the connection, unless it was released; idempotent."""
        if self.pending:
            self.release().close()
