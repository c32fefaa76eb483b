"""The meeting that a rank serves itself, while it waits for the others: no thread is needed."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.connections.frames import unpack
from hvdlite.common.connections.loop import Loop
from hvdlite.common.meeting import wire
from hvdlite.common.meeting.participant import Participant
from hvdlite.common.meeting.patience import Patience
from hvdlite.common.meeting.server import MeetingServer

GOODBYE_SECONDS = 2.0  # The longest wait of `close` for ranks that read the last answer.


class _Own:
    """The rank that serves, as a guest of its own server."""

    def __init__(self, rank: int, members: Sequence[int]) -> None:
        self.rank, self.members = rank, tuple(members)
        self.given = 0
        self.inbox: deque[bytes] = deque()

    def send(self, head: bytes) -> None:
        """See `Guest.send`."""
        self.inbox.append(head)


class HostedExchange:
    """The exchange of `me`, which serves the meeting at `listener`; see `Exchange`.

    All ranks of the job may meet there, also those of another meeting. The port is closed by
    `close`, when the others have left, so that another program can have it.
    """

    def __init__(self, listener: socket.socket, me: Participant) -> None:
        self.rank, self.size = me.place
        self._own = _Own(me.rank, me.members or ())
        self._patience = Patience(me.rank, me.size, me.deadline)
        self._loop = Loop()
        self._server = MeetingServer(
            self._loop, listener, range(me.size), me.size, me.secret, job=me.job
        )
        self._server.join(self._own)

    def allgather(self, body: bytes) -> list[bytes]:
        """See `Exchange.allgather`."""
        wire.check_body(body)
        self._server.give(self._own, bytes(body))
        while not self._own.inbox:
            self._loop.run_once(self._patience.seconds())
            if not self._own.inbox and (self._patience.over or self._patience.line_is_due()):
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
        server, patience = self._server, self._patience
        who = server.presence(self._own).spell()
        if not patience.over:
            patience.log(who)
            return
        server.give_up(f"rank {self._own.rank} has given up to wait in init(): {who}")
        self._own.inbox.clear()
        raise patience.error(who)

    def close(self) -> None:
        """See `Exchange.close`."""
        self._server.leave(self._own)
        self._server.close(GOODBYE_SECONDS)
        self._loop.close()
