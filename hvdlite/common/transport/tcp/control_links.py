"""The control messages of a rank with all ranks of other hosts.

Two ranks of the control tree share one connection. Others have none until one sends a message: the
sender dials a connection of its own, so that two ranks which begin at once have two of them.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.connections.liveness import Liveness
from hvdlite.common.connections.loop import Loop
from hvdlite.common.transport.base import Incoming
from hvdlite.common.transport.tcp.connections import Connections
from hvdlite.common.transport.tcp.control import ControlLink
from hvdlite.common.transport.tcp.strangers import CONTROL, CONTROL_ONE_WAY, Slot

GOODBYE_SECONDS = 2.0  # The longest wait of `close` for remote ranks.
GOODBYE_STEP_SECONDS = 1e-3  # Nothing tells when a peer has confirmed what it was sent.

log = logging.getLogger("hvdlite")


class ControlLinks:
    """The links of `rank`; what they bring is given to `arrived`."""

    def __init__(
        self,
        rank: int,
        poller: Loop,
        liveness: Liveness,
        connections: Connections,
        arrived: Callable[[Incoming], None],
    ) -> None:
        self._rank = rank
        self._poller, self._liveness = poller, liveness
        self._connections = connections
        connections.not_entered = self._on_not_entered
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
        return ControlLink(rank, self._poller, self._liveness, self._deliver)

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
            if self._connections.entering(message.rank):
                return
        self._arrived(message)

    def _on_not_entered(self, rank: int) -> None:
        link = self._links.get(rank)
        if link is not None and link.lost:
            self._deliver(Incoming(rank, None))

    # -- closing

    def say_goodbye(self) -> None:
        """Send what is queued. A connection that is closed with messages unread loses the rest."""
        links = [*self._links.values(), *self._one_way]
        deadline = time.monotonic() + GOODBYE_SECONDS
        finished: set[int] = set()
        while time.monotonic() < deadline:
            for index, link in enumerate(links):
                if link.idle and index not in finished and not self._sends_elsewhere(link):
                    finished.add(index)
                    link.finish()
            if all(link.confirmed for link in links):
                return
            try:
                self._poller.run_once(GOODBYE_STEP_SECONDS)
            except HorovodInternalError as error:  # Nobody listens any more.
                log.debug("rank %d: %s, while closing", self._rank, error)

    def _sends_elsewhere(self, link: ControlLink) -> bool:
        """Return whether messages for the peer of `link` wait for a connection of our own.

        The peer would take the end of the only link that it knows of for the end of this rank.
        """
        return link in self._one_way and not self._links.get(link.rank, link).idle

    def close(self) -> None:
        """Close the connections."""
        for link in (*self._links.values(), *self._one_way):
            link.close()
