"""Control messages between two ranks of different hosts, over one TCP connection."""

from __future__ import annotations

import fcntl
import socket
import termios
from collections import deque
from collections.abc import Callable

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.connections.liveness import Liveness
from hvdlite.common.connections.loop import READ, WRITE, Loop
from hvdlite.common.transport.base import Incoming
from hvdlite.common.transport.framing import FRAME_BYTES, HEADER, MAGIC, Assembler, frames


class ControlLink:
    """The messages to and from `rank`; those that are sent before it is connected are queued."""

    def __init__(
        self,
        rank: int,
        poller: Loop,
        liveness: Liveness,
        deliver: Callable[[Incoming], None],
    ) -> None:
        self.rank = rank
        self.connected = False
        self.lost = False
        self._poller = poller
        self._liveness = liveness
        self._deliver = deliver
        self._connection: socket.socket | None = None
        self._outbox: deque[bytes | memoryview] = deque()  # What was not accepted yet.
        self._input = bytearray()  # The beginning of a frame.
        self._assembler = Assembler(rank)
        self._events = 0

    def attach(self, connection: socket.socket) -> None:
        """Use `connection` from now on."""
        self._connection = connection
        self.connected = True
        self._flush()
        self._watch()

    def send(self, body: bytes) -> None:
        """Queue a message, and send what the connection accepts."""
        if self.lost:
            return
        waits = bool(self._outbox)
        self._outbox.extend(frames(body))
        if self._connection is not None and not waits:
            self._flush()
            self._watch()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to send."""
        return self.lost or not self._outbox

    def _watch(self) -> None:
        if self._connection is None or self.lost:
            return
        events = READ | WRITE if self._outbox else READ
        if events != self._events:
            self._events = events
            self._poller.watch(self._connection.fileno(), events, self._on_ready)

    def _on_ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & ~WRITE:
            self._read()
        self._watch()

    def _flush(self) -> None:
        """Send until the connection accepts no more. A lost peer is noticed when reading."""
        assert self._connection is not None
        try:
            while self._outbox:
                part = self._outbox[0]
                sent = self._connection.send(part, socket.MSG_NOSIGNAL)
                if sent < len(part):
                    self._outbox[0] = memoryview(part)[sent:]
                else:
                    self._outbox.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._outbox.clear()
        self._liveness.watch(self._connection, self.end)

    def _read(self) -> None:
        assert self._connection is not None
        while True:
            try:
                part = self._connection.recv(FRAME_BYTES)
            except BlockingIOError:
                return
            except OSError:
                part = b""
            if not part:
                self.end()
                return
            self._input += part
            self._take_frames()
            if len(part) < FRAME_BYTES:
                return  # The end of the connection, if it is there, wakes the poller again.

    def _take_frames(self) -> None:
        buffer, start = self._input, 0
        while len(buffer) - start >= HEADER.size:
            magic, length, _ = HEADER.unpack_from(buffer, start)
            if magic != MAGIC or length > FRAME_BYTES - HEADER.size:
                text = f"rank {self.rank} sent a frame that begins with {magic:#x}, {length} bytes"
                raise ProtocolError(text, self.rank)
            stop = start + HEADER.size + length
            if len(buffer) < stop:
                break
            body = self._assembler.add(bytes(buffer[start:stop]))
            start = stop
            if body is not None:
                self._deliver(Incoming(self.rank, body))
        del buffer[:start]

    def end(self, error: OSError | None = None) -> None:
        """Report once that the peer has closed the connection, is gone, or cannot be dialled."""
        if not self.lost:
            self.lost = True
            self._outbox.clear()
            if self._connection is not None:
                self._poller.forget(self._connection.fileno())
            self._deliver(Incoming(self.rank, None))

    def finish(self) -> None:
        """Tell the peer that no more messages follow."""
        if self._connection is not None and not self.lost:
            try:
                self._connection.shutdown(socket.SHUT_WR)
            except OSError:
                self.end()

    @property
    def confirmed(self) -> bool:
        """Whether the peer has all that was sent, and the end."""
        if self.lost:
            return True
        if self._connection is None:  # It is being dialled.
            return not self._outbox
        waiting = fcntl.ioctl(self._connection.fileno(), termios.TIOCOUTQ, bytes(4))
        return not self._outbox and not any(waiting)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._poller.forget(self._connection.fileno())
            self._connection.close()
