"""A meeting that this process serves in a thread of its own, at a port that nobody else can take.

A port that is chosen first and bound later may be taken by another process in between. Here it is
bound from the start, for as many meetings as the ranks hold.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref

from hvdlite.common.connections.loop import Loop
from hvdlite.common.meeting.server import MeetingServer


class ServedMeeting:
    """Serves the meetings of `size` ranks at `listener` until `close`, which closes it, too."""

    def __init__(self, listener: socket.socket, size: int, secret: str) -> None:
        self._loop = Loop()
        self._server = MeetingServer(self._loop, listener, range(size), size, secret.encode())
        self._over = False
        # Owns _server and _loop. Ends with close(), or with the process.
        self._thread = threading.Thread(target=self._serve, name="hvdlite-meeting", daemon=True)
        self._thread.start()
        _served.add(self)

    def _serve(self) -> None:
        while not self._over:
            self._loop.run_once()
        self._server.close()

    def close(self) -> None:
        """End the meetings; ranks that wait in one learn it by the end of their connection."""
        _served.discard(self)
        self._over = True
        self._loop.wake()
        self._thread.join()
        self._loop.close()

    def after_fork_in_child(self) -> None:
        """Close this process's copies of all descriptors: they would hide the end of the parent."""
        self._loop.close()
        self._server.after_fork_in_child()


_served: weakref.WeakSet[ServedMeeting] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for meeting in list(_served):
        meeting.after_fork_in_child()
    _served.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
