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

from hvdlite.common.connections.loop import Loop

CHECKS = 8  # Within the limit.
RTO_MAX_MS = 44  # TCP_RTO_MAX_MS of Linux 6.15: the longest time between two attempts to send.
SHORTEST_RTO_MAX_MS = 1000  # The kernel takes no less.
# Of struct tcp_info, in this order: timeouts of what was sent; unanswered probes of a closed
# window; segments without an answer; ms since the last answer; segments that were sent again;
# bytes that wait for the window.
INFO = struct.Struct("2xBB20xI28xI40xI40xI")
NO_NEW_ANSWER_SECONDS = 0.1  # Times of the same answer differ by less.


class _Watched:
    def __init__(self, end: Callable[[OSError], None]) -> None:
        self.end = end
        self.answered = 0.0  # When the peer's kernel was last heard, in monotonic seconds.
        self.attempts = 0  # How often the kernel had asked when that was noticed.


class Liveness:
    """The connections of one rank on which bytes are on their way."""

    def __init__(self, loop: Loop, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds
        self._loop = loop
        self._watched: dict[socket.socket, _Watched] = {}
        self._armed = False

    def prepare(self, connection: socket.socket) -> None:
        """Set the options of a new connection between hosts."""
        if connection.family == socket.AF_UNIX:
            return
        limit = self.limit_seconds
        idle, interval = max(1, int(limit * 0.3)), max(1, int(limit * 0.2))
        options = {
            socket.TCP_NODELAY: 1,
            socket.TCP_KEEPIDLE: idle,
            socket.TCP_KEEPINTVL: interval,
            socket.TCP_KEEPCNT: max(1, int((limit - idle) / interval)),
        }
        for option, value in options.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with contextlib.suppress(OSError):  # An older kernel.
            longest = max(SHORTEST_RTO_MAX_MS, int(limit * 1000 / CHECKS))
            connection.setsockopt(socket.IPPROTO_TCP, RTO_MAX_MS, longest)

    def watch(self, connection: socket.socket, end: Callable[[OSError], None]) -> None:
        """Examine `connection` until the peer has confirmed all bytes; call `end` if it is gone."""
        if connection in self._watched or connection.family == socket.AF_UNIX:
            return
        self._watched[connection] = _Watched(end)
        self._arm()

    def _arm(self) -> None:
        if self._watched and not self._armed:
            self._armed = True
            self._loop.call_after(self.limit_seconds / CHECKS, self._examine)

    def _examine(self) -> None:
        self._armed = False
        limit = self.limit_seconds * (1 - 1 / CHECKS)  # It is noticed at the next check.
        for connection, watched in list(self._watched.items()):
            silent_seconds = _silence(connection, watched)
            if silent_seconds is None:
                del self._watched[connection]
            elif silent_seconds > limit:
                del self._watched[connection]
                watched.end(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))
        self._arm()


def _silence(connection: socket.socket, watched: _Watched) -> float | None:
    """Return for how long the peer's kernel owes an answer; None if nothing is on its way.

    It owes none while nobody has asked: a closed window is probed less and less often.
    """
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO.size)
    except OSError:  # It was closed here.
        return None
    if len(info) < INFO.size:  # A kernel before Linux 4.6.
        return None
    timeouts, probes, unanswered, last_ms, repeated, waiting = INFO.unpack(info)
    if not (probes or unanswered or waiting):
        return None
    attempts = timeouts + repeated
    answered = time.monotonic() - last_ms / 1000
    if answered > watched.answered + NO_NEW_ANSWER_SECONDS:
        watched.answered, watched.attempts = answered, attempts
    return last_ms / 1000 if probes or attempts > watched.attempts else 0.0
