"""Notice within a limit that the other host of a connection is gone, as when a cable is cut.

The kernel probes a connection on which nothing is on its way (keepalive). While bytes are on their
way it does not, and tries to send them again for 15 minutes. TCP_USER_TIMEOUT would end that, but
also ends a connection whose peer is alive and only does not read for a while, as a rank that is
busy in Python: its kernel answers every probe, and still the limit counts. So the connections on
which bytes are on their way are examined here, by the time since the peer's kernel was last heard.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Callable

from hvdlite.common.transport.poller import Poller

CHECKS = 8  # Within the limit.
RTO_MAX_MS = 44  # TCP_RTO_MAX_MS of Linux 6.15: the longest time between two attempts to send.
# Of struct tcp_info: unanswered probes of a full window; segments without an answer, ms since the
# last answer; bytes that wait for the window.
PROBES, UNANSWERED, LAST_ANSWER, WAITING = (
    struct.Struct(layout) for layout in ("3xB", "24xI", "56xI", "144xI")
)
INFO_BYTES = 148


class Liveness:
    """The connections of one rank on which bytes are on their way."""

    def __init__(self, poller: Poller, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds
        self._poller = poller
        self._watched: dict[socket.socket, Callable[[OSError], None]] = {}
        self._armed = False

    def prepare(self, connection: socket.socket) -> None:
        """Set the options of a new connection between hosts."""
        if connection.family == socket.AF_UNIX:
            return
        limit = self.limit_seconds
        options = {
            socket.TCP_NODELAY: 1,
            socket.TCP_KEEPIDLE: max(1, int(limit * 0.3)),
            socket.TCP_KEEPINTVL: max(1, int(limit * 0.2)),
            socket.TCP_KEEPCNT: 3,
        }
        for option, value in options.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with contextlib.suppress(OSError):  # An older kernel.
            longest = max(1000, int(limit * 1000 / CHECKS))
            connection.setsockopt(socket.IPPROTO_TCP, RTO_MAX_MS, longest)

    def watch(self, connection: socket.socket, end: Callable[[OSError], None]) -> None:
        """Examine `connection` until the peer has confirmed all bytes; call `end` if it is gone."""
        if connection in self._watched or connection.family == socket.AF_UNIX:
            return
        self._watched[connection] = end
        self._arm()

    def _arm(self) -> None:
        if self._watched and not self._armed:
            self._armed = True
            self._poller.call_at(time.monotonic() + self.limit_seconds / CHECKS, self._examine)

    def _examine(self) -> None:
        self._armed = False
        for connection, end in list(self._watched.items()):
            under_way, silent_seconds = _state(connection)
            if not under_way:
                del self._watched[connection]
            elif silent_seconds > self.limit_seconds * (1 - 1 / CHECKS):
                del self._watched[connection]
                end(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))
        self._arm()


def _state(connection: socket.socket) -> tuple[bool, float]:
    """Return whether bytes are on their way, and for how long the peer's kernel owes an answer."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    except OSError:  # It was closed here.
        return False, 0.0
    if len(info) < INFO_BYTES:  # A kernel before Linux 4.6.
        return False, 0.0
    (probes,), (unanswered,) = PROBES.unpack_from(info), UNANSWERED.unpack_from(info)
    (waiting,), (last_ms,) = WAITING.unpack_from(info), LAST_ANSWER.unpack_from(info)
    owes = bool(unanswered or probes)
    return owes or waiting > 0, last_ms / 1000 if owes else 0.0
