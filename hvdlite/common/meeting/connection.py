"""One connection of a meeting server: the bytes in both directions, without their meaning."""

from __future__ import annotations

import select
import socket
import time
from collections import deque

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.meeting import handshake, wire

READ_BYTES = 1 << 16


class Connection:
    """A stranger at first, then the guest `rank`; see `Guest`.

    `poller` waits for input, and for room while not all is sent.
    """

    def __init__(self, accepted: socket.socket, poller: select.epoll) -> None:
        accepted.setblocking(False)
        if accepted.family != socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.accepted_at = time.monotonic()
        self.nonce = handshake.new_nonce()
        self.claim = bytearray()
        self.frames = wire.Frames(wire.FRAME_BYTES)
        self.rank = -1
        self.members: tuple[int, ...] = ()
        self.given = 0
        # Whether the connection is to be closed as soon as all is sent.
        self.ends = False
        self._socket, self._poller = accepted, poller
        self._outbox: deque[memoryview] = deque()
        poller.register(accepted, select.EPOLLIN)
        self.send(wire.pack_greeting(self.nonce))

    def fileno(self) -> int:
        """Return the descriptor, -1 after `close`."""
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """See `Guest.send`."""
        self._outbox.append(memoryview(frame))
        self.flush()

    def flush(self) -> None:
        """Send what fits into the socket, and have the rest sent when there is room."""
        try:
            while self._outbox:
                sent = self._socket.send(self._outbox[0])
                if sent == len(self._outbox[0]):
                    self._outbox.popleft()
                else:
                    self._outbox[0] = self._outbox[0][sent:]
        except BlockingIOError:
            pass
        except OSError:  # Reading tells of the end of the connection.
            self._outbox.clear()
        if self.fileno() >= 0:
            room = select.EPOLLOUT if self._outbox else 0
            self._poller.modify(self._socket, select.EPOLLIN | room)

    @property
    def idle(self) -> bool:
        """Whether all is sent."""
        return not self._outbox

    def read(self) -> bytes | None:
        """Return what has arrived; empty at the end of the connection, None where nothing has."""
        try:
            return self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def complete_claim(self, data: bytes) -> bytes | None:
        """Add `data` to the claim; return what follows it, or None while it is not complete.

        Raises `ProtocolError` for another program's bytes.
        """
        room = wire.CLAIM_BYTES - len(self.claim)
        self.claim += data[:room]
        if not wire.MAGIC.startswith(self.claim[: len(wire.MAGIC)]):
            raise ProtocolError(f"it says {bytes(self.claim[:8])!r}")
        return data[room:] if len(self.claim) == wire.CLAIM_BYTES else None

    def peer_name(self) -> str:
        """Return the address of the other end, for messages."""
        try:
            peer = self._socket.getpeername()
        except OSError:
            return "an unknown address"
        return str(peer[0]) if isinstance(peer, tuple) else "this host"

    def close(self) -> None:
        """Close the connection."""
        self._poller.unregister(self._socket)
        self._socket.close()

    def after_fork_in_child(self) -> None:
        """Close this process's copy of the descriptor."""
        self._socket.close()
