"""Connections whose other end has not proved yet who it is: all of them while they are made."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.connections.loop import READ, Loop

RESETS = (errno.ECONNRESET, errno.EPIPE)
CLOSED = "it closed the connection, so another program or another job answers there"
CREDENTIALS = struct.Struct("3i")  # The pid, uid and gid of SO_PEERCRED.
LINGER = struct.Struct("ii")


class Stranger:
    """One such connection. Reads exactly the bytes that are due, and sends a few.

    ``failed(error)`` is called at most once, after the connection was closed: with an `OSError`, or
    a `ProtocolError` where the other end says what it should not.
    """

    def __init__(
        self, loop: Loop, connection: socket.socket, failed: Callable[[Exception], None]
    ) -> None:
        self.connection = connection
        self.pending = True  # Until it is closed, or released to be used.
        self._loop, self._failed = loop, failed
        self._body = b""
        self._due = 0
        self._step: Callable[[bytes], None]
        self._accepts: Callable[[bytes], bool]

    def expect(
        self, count: int, step: Callable[[bytes], None],
        accepts: Callable[[bytes], bool] = lambda beginning: True,
    ) -> None:  # fmt: skip
        """Call `step` with the next `count` bytes; fail when they do not begin as it `accepts`."""
        self._body, self._due, self._step, self._accepts = b"", count, step, accepts
        self._loop.watch(self.connection.fileno(), READ, self._read)

    def _read(self, events: int) -> None:
        try:
            part = self.connection.recv(self._due - len(self._body))
        except BlockingIOError:
            return
        except OSError as error:
            self.fail(error)
            return
        if not part:
            self.fail(ConnectionResetError(CLOSED))
            return
        self._body += part
        if not self._accepts(self._body):
            self.fail(ProtocolError(f"it says {self._body[:8]!r}"))
        elif len(self._body) == self._due:
            try:
                self._step(self._body)
            except ProtocolError as error:
                if not self.pending:  # It is of who uses the connection by now.
                    raise
                self.fail(error)

    def say(self, body: bytes) -> bool:
        """Send the few bytes of a step; return whether they were accepted."""
        try:
            if self.connection.send(body, socket.MSG_NOSIGNAL) == len(body):
                return True
            # The buffer of a new connection holds all steps.
            self.fail(ConnectionError("it accepts no data"))
        except OSError as error:
            self.fail(error)
        return False

    def release(self) -> socket.socket:
        """Return the connection, which is not watched any more."""
        self.pending = False
        self._loop.forget(self.connection.fileno())
        return self.connection

    def fail(self, error: Exception) -> None:
        """Close the connection because of `error`."""
        if self.pending:
            self.close()
            self._failed(error)

    def close(self, *, reset: bool = False) -> None:
        """Close the connection, unless it was released; idempotent.

        A `reset` tells an honest other end that it may try again.
        """
        if self.pending:
            if reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER.pack(1, 0))
            self.release().close()


def why(error: Exception) -> str:
    """Return what `error` says of a connection."""
    number = getattr(error, "errno", None)
    if isinstance(error, socket.gaierror):
        return str(error.strerror).lower()
    if number in RESETS:
        return CLOSED
    return os.strerror(number).lower() if number else str(error)


def check_credentials(connection: socket.socket) -> None:
    """Raise `ProtocolError` if the other end of a Unix socket belongs to another user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(raw)
    if uid != os.geteuid():
        raise ProtocolError(
            f"process {pid} of user {uid} tried to join this job, which belongs to user "
            f"{os.geteuid()}"
        )


def peer_name(connection: socket.socket) -> str:
    """Return the address of the other end, for messages."""
    try:
        peer = connection.getpeername()
    except OSError:
        return "an unknown address"
    return str(peer[0]) if isinstance(peer, tuple) else "this host"
