"""Meetings that this process serves: in a thread of its own, or as a rank that waits anyway.

A port that is chosen first and bound later may be taken by another process in between. Here it is
bound from the start, for as many meetings as the ranks hold.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Sequence

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.connections.frames import unpack
from hvdlite.common.connections.loop import Loop
from hvdlite.common.meeting import wire
from hvdlite.common.meeting.client import Participant
from hvdlite.common.meeting.server import MeetingServer
from hvdlite.common.meeting.start_wait import StartWait

GOODBYE_SECONDS = 2.0  # The longest wait of `close` for ranks that read the last answer.


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


class _Own:
    """The rank that serves, as a guest of its own server."""

    def __init__(self, rank: int, members: Sequence[int]) -> None:
        self.rank, self.members = rank, tuple(members)
        self.given = 0
        self.inbox: deque[bytes] = deque()

    def send(self, head: bytes) -> None:
        self.inbox.append(head)


class HostedExchange:
    """The exchange of `me`, which serves the meeting at `listener` while it waits; see `Exchange`.

    All ranks of the job may meet there, also those of another meeting. The port is closed by
    `close`, when the others have left, so that another program can have it.
    """

    def __init__(self, listener: socket.socket, me: Participant) -> None:
        self.rank, self.size = me.place
        self._own = _Own(me.rank, me.members or ())
        self._wait = StartWait(me.rank, me.size, me.deadline)
        self._loop = Loop()
        self._server = MeetingServer(
            self._loop, listener, range(me.size), me.size, me.secret, job=me.job
        )
        self._server.join(self._own)

    def allgather(self, body: bytes) -> list[bytes]:
        wire.check_body(body)
        self._server.give(self._own, bytes(body))
        while not self._own.inbox:
            self._loop.run_once(self._wait.seconds())
            if not self._own.inbox and (self._wait.over or self._wait.line_is_due()):
                self._say_who_is_missing()
        match message := unpack(self._own.inbox.popleft()):
            case [wire.BODIES, _, [*bodies]]:
                return bodies
            case [wire.FAIL, str(text), rank]:
                raise HorovodInternalError(text, rank)
            case [wire.OTHER_HVDLITE, _, version]:
                raise wire.mismatch(version)
        raise AssertionError(f"the server of this process sent {message[0]}")

    def _say_who_is_missing(self) -> None:
        """Log the missing ranks; at the deadline, end the wait of all ranks.

        Those that have more time wait for another server: this rank may call init again.
        """
        server, wait = self._server, self._wait
        who = server.presence(self._own).spell()
        if not wait.over:
            wait.log(who)
            return
        server.give_up(f"rank {self._own.rank} has given up to wait in init(): {who}")
        self._own.inbox.clear()
        raise wait.error(who)

    def close(self) -> None:
        self._server.leave(self._own)
        self._server.close(GOODBYE_SECONDS)
        self._loop.close()
