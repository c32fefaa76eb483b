"""A connection that sends and receives messages without waiting, for several threads."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from typing import Any

from hvdlite.common.meeting import wire

READ_BYTES = 1 << 18


class FrameSocket:
    """Messages over `connection`, which does not block; one thread reads, and any may send."""

    def __init__(self, connection: socket.socket) -> None:
        self.frames = wire.Frames(wire.FRAME_BYTES)
        self._socket = connection
        # Guards the outbox. Reentrant, as signal handlers may send.
        self._lock = threading.RLock()
        self._outbox: deque[memoryview] = deque()

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self._socket.fileno()

    @property
    def waits(self) -> bool:
        """Whether something could not be sent yet, for which `flush` is to be called."""
        return bool(self._outbox)

    def send(self, *message: Any) -> bool:
        """Send a message, or keep it until there is room; return whether that is all."""
        with self._lock:
            self._outbox.append(memoryview(wire.pack_frame(*message)))
            return self.flush()

    def flush(self) -> bool:
        """Send what fits into the socket; return whether that is all."""
        with self._lock:
            try:
                while self._outbox:
                    sent = self._socket.send(self._outbox[0], socket.MSG_NOSIGNAL)
                    self._outbox[0] = self._outbox[0][sent:]
                    if not self._outbox[0]:
                        self._outbox.popleft()
            except BlockingIOError:
                return False
            except OSError:  # Reading tells of the end of the connection.
                self._outbox.clear()
            return True

    def send_last(self, *message: Any, seconds: float) -> None:
        """Send all that is left and a last message, for at most `seconds` each."""
        with self._lock, contextlib.suppress(OSError):  # The peer has gone, or does not read.
            self._outbox.append(memoryview(wire.pack_frame(*message)))
            self._socket.settimeout(seconds)
            while self._outbox:
                self._socket.sendall(self._outbox.popleft())

    def read(self) -> bytes | None:
        """Return what has arrived for `frames`, empty at the end; None: nothing. May raise."""
        try:
            return self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return None

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
