"""Control messages with the ranks of other hosts.

Two ranks of the control tree share one connection. Others have none until one sends a message: the
sender dials a connection of its own, so that two ranks which begin at once have two of them.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

from hvdlite.common.base.errors import HorovodInternalError, ProtocolError
from hvdlite.common.connections.link import Link
from hvdlite.common.connections.liveness import Liveness
from hvdlite.common.connections.loop import Loop
from hvdlite.common.transport.base import Incoming
from hvdlite.common.transport.framing import MESSAGE_BYTES, check_length
from hvdlite.common.transport.tcp.connections import (
    CONTROL,
    CONTROL_ONE_WAY,
    Connections,
    Slot,
)

GOODBYE_SECONDS = 2.0  # The longest wait of `close` for remote ranks.
GOODBYE_STEP_SECONDS = 1e-3  # Nothing tells when a peer has confirmed what it was sent.

log = logging.getLogger("hvdlite")


class ControlLink:
    """The messages to and from `rank`; those that are sent before it is connected are queued."""

    def __init__(
        self, rank: int, loop: Loop, liveness: Liveness, deliver: Callable[[Incoming], None]
    ) -> None:
        self.rank = rank
        self.lost = False
        self._loop, self._liveness, self._deliver = loop, liveness, deliver
        self._link: Link | None = None
        self._queued: list[bytes] = []  # Until it is connected.

    def attach(self, connection: socket.socket) -> None:
        self._link = Link(
            self._loop, connection, ended=self._ended,
            received=lambda body, _arrays: self._deliver(Incoming(self.rank, body)),
            most_bytes=MESSAGE_BYTES, unpacker=bytes, liveness=self._liveness,
        )  # fmt: skip
        for body in self._queued:
            self._link.send_head(body)
        self._queued.clear()

    def send(self, body: bytes) -> None:
        """Send a message as soon as there is room for it."""
        check_length(body)
        if self._link is not None:
            self._link.send_head(body)
        elif not self.lost:
            self._queued.append(bytes(body))

    @property
    def connected(self) -> bool:
        return self._link is not None

    def _ended(self, reason: str) -> None:
        assert self._link is not None
        self.end()
        if self._link.at_fault:
            raise ProtocolError(f"rank {self.rank}: {reason}", self.rank)

    def end(self) -> None:
        """Report once that the peer has closed the connection, is gone, or cannot be dialled."""
        if not self.lost:
            self.lost = True
            self._queued.clear()
            self._deliver(Incoming(self.rank, None))

    @property
    def idle(self) -> bool:
        """Whether nothing is left to send."""
        return not self._queued and (self._link is None or not self._link.queued_bytes)

    def finish(self) -> None:
        """Tell the peer that no more messages follow."""
        if self._link is not None:
            self._link.finish()

    @property
    def confirmed(self) -> bool:
        """Whether the peer has all that was sent, and the end."""
        return self.idle and (self._link is None or not self._link.unconfirmed_bytes)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()


class ControlLinks:
    """The links of `rank`; what they bring is given to `arrived`."""

    def __init__(
        self,
        rank: int,
        loop: Loop,
        liveness: Liveness,
        connections: Connections,
        arrived: Callable[[Incoming], None],
    ) -> None:
        self._rank = rank
        self._loop, self._liveness = loop, liveness
        self._connections = connections
        self._arrived = arrived
        # The links over which this rank sends, and those over which it only receives.
        self._links: dict[int, ControlLink] = {}
        self._one_way: list[ControlLink] = []

    def expect(self, rank: int) -> ControlLink:
        """Return the link to a rank of the control tree; the higher rank dials it."""
        return self._links.get(rank) or self._add(rank, CONTROL, dials=rank < self._rank)

    def link(self, rank: int) -> ControlLink:
        """Return the link over which to send to a rank; dial those that are not in the tree."""
        return self._links.get(rank) or self._add(rank, CONTROL_ONE_WAY, dials=True)

    def _add(self, rank: int, channel: int, *, dials: bool) -> ControlLink:
        link = self._links[rank] = self._new(rank)
        if dials:
            self._connections.dial(Slot(rank, channel))
        return link

    def _new(self, rank: int) -> ControlLink:
        return ControlLink(rank, self._loop, self._liveness, self._deliver)

    def attach(self, slot: Slot, connection: socket.socket, *, dialled: bool) -> None:
        """Use a new connection; not `dialled` means that the other rank has."""
        if dialled or slot.channel == CONTROL:
            link = self._links.get(slot.rank) or self._add(slot.rank, CONTROL, dials=False)
        else:
            link = self._new(slot.rank)
            self._one_way.append(link)
        link.attach(connection)

    def _deliver(self, message: Incoming) -> None:
        """Pass on a message; a rank is lost when all links to it are.

        A link of the rank that is about to enter may bring messages that were sent before the end
        of another link.
        """
        if message.body is None:
            links = [self._links.get(message.rank), *self._one_way]
            if any(link and link.rank == message.rank and not link.lost for link in links):
                return
            if self._connections.entering(Slot(message.rank, CONTROL_ONE_WAY)):
                return
        self._arrived(message)

    def on_not_entered(self, slot: Slot) -> None:
        """Report the loss of a rank whose last link was about to enter."""
        link = self._links.get(slot.rank)
        if slot.channel == CONTROL_ONE_WAY and link is not None and link.lost:
            self._deliver(Incoming(slot.rank, None))

    # -- closing

    def say_goodbye(self) -> None:
        """Send what is queued. A connection that is closed with messages unread loses the rest."""
        links = [*self._links.values(), *self._one_way]
        deadline = time.monotonic() + GOODBYE_SECONDS
        while time.monotonic() < deadline:
            for link in links:
                # While messages for its peer wait for a connection of our own, the peer would take
                # the end of the only link that it knows of for the end of this rank.
                elsewhere = link in self._one_way and not self._links.get(link.rank, link).idle
                if link.idle and not elsewhere:
                    link.finish()
            if all(link.confirmed for link in links):
                return
            try:
                self._loop.run_once(GOODBYE_STEP_SECONDS)
            except HorovodInternalError as error:  # Nobody listens any more.
                log.debug("rank %d: %s, while closing", self._rank, error)

    def close(self) -> None:
        for link in (*self._links.values(), *self._one_way):
            link.close()
