"""A listener with all of its connections: those that are accepted, and strangers.

A connection is a stranger's until its claim is proven; strangers are dropped when they are silent,
and when there are too many of them.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque

from hvdlite.common.meeting.connection import Connection

SILENCE_SECONDS = 5.0  # A stranger that has not proven its claim after this time is dropped.


class Doorway:
    """What a server needs to accept, find and close its connections; it closes `listener`.

    The server is driven by events and starts no thread: whoever has one waits until `fileno` is
    readable, by a selector of its own, and lets the server handle what there is.
    """

    def __init__(self, listener: socket.socket, most_strangers: int) -> None:
        self._connections: dict[int, Connection] = {}  # By descriptor.
        self._strangers: deque[Connection] = deque()  # In the order of their arrival.
        self._most_strangers = most_strangers
        self._listener = listener
        listener.setblocking(False)
        self._epoll = select.epoll()
        # By the edge: a connection that cannot be accepted wakes the server once, not all the time.
        self._epoll.register(listener, select.EPOLLIN | select.EPOLLET)

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is something to do."""
        return self._epoll.fileno()

    def after_fork_in_child(self) -> None:
        """Close this process's copies of all descriptors."""
        self._epoll.close()
        self._listener.close()
        for connection in self._connections.values():
            connection.after_fork_in_child()

    def _accept(self) -> None:
        """Accept a connection that waits. Raises `OSError`."""
        accepted, _ = self._listener.accept()
        connection = Connection(accepted, self._epoll)
        self._connections[connection.fileno()] = connection
        self._strangers.append(connection)
        if len(self._strangers) > self._most_strangers:
            self._close(self._strangers[0])

    def _close_silent_strangers(self) -> None:
        oldest = time.monotonic() - SILENCE_SECONDS
        while self._strangers and self._strangers[0].accepted_at < oldest:
            self._close(self._strangers[0])

    def _close(self, connection: Connection) -> bool:
        """Close a connection; return whether it was open."""
        with contextlib.suppress(ValueError):
            self._strangers.remove(connection)
        if self._connections.pop(connection.fileno(), None) is None:
            return False
        connection.close()
        return True

    def _close_all(self) -> None:
        for connection in list(self._connections.values()):
            self._close(connection)
        self._epoll.close()
