"""A meeting that this process serves in a thread of its own, at a port that nobody else can take.

A port that is chosen first and bound later may be taken by another process in between. Here it is
bound from the start, for as many meetings as the ranks hold.
"""

from __future__ import annotations

import select
import socket
import threading

from hvdlite.common.meeting.server import SILENCE_SECONDS, MeetingServer


class ServedMeeting:
    """Serves the meetings of `size` ranks at `listener` until `close`, which closes it, too."""

    def __init__(self, listener: socket.socket, size: int, secret: str) -> None:
        self._server = MeetingServer(listener, range(size), size, secret.encode())
        self._stopped, self._stop = socket.socketpair()
        # Owns _server. Ends with close(), or with the process.
        self._thread = threading.Thread(target=self._serve, name="hvdlite-meeting", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        end = self._stopped.fileno()
        inputs = [self._server.fileno(), end]
        while end not in select.select(inputs, [], [], SILENCE_SECONDS)[0]:
            self._server.handle()
        self._server.close()

    def close(self) -> None:
        """End the meetings; ranks that wait in one learn it by the end of their connection."""
        self._stop.close()
        self._thread.join()
        self._stopped.close()
