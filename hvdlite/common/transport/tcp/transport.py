"""The transport of a job over TCP: sockets and shared memory inside a host, TCP between hosts.

After `connect` only the engine thread calls this transport. It waits in one epoll for everything:
wake-ups, Unix sockets, listeners, control messages and arrays; nothing is asked again and again.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.base.errors import HorovodInternalError, PeerLostError
from hvdlite.common.base.topology import Topology
from hvdlite.common.transport.base import (
    CHECK_SECONDS,
    Array,
    Incoming,
    Pending,
    connection_lost,
    do_nothing,
)
from hvdlite.common.transport.local import LocalMesh
from hvdlite.common.transport.tcp.connections import Connections
from hvdlite.common.transport.tcp.control import ControlLink
from hvdlite.common.transport.tcp.liveness import Liveness
from hvdlite.common.transport.tcp.strangers import CONTROL, CONTROL_ONE_WAY, DATA, Slot
from hvdlite.common.transport.tcp.streams import DataLink, Transfer

GOODBYE_SECONDS = 2.0  # The longest wait of `close` for remote ranks.
GOODBYE_STEP_SECONDS = 1e-3  # Nothing tells when a peer has confirmed what it was sent.
SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
REMEDY = (
    "Is a firewall between the hosts? HVDLITE_NETWORK_INTERFACES (--network-interfaces) chooses "
    "the network, HVDLITE_TCP_PORTS (--tcp-ports) the ports that must be open"
)

log = logging.getLogger("hvdlite")


class Job(NamedTuple):
    """What a rank knows of the job when its transport begins."""

    rank: int
    topology: Topology
    host_names: Sequence[str]  # By rank.
    streams: int  # Between two ranks of different hosts.


class TcpTransport:
    """One rank of a job over TCP; made by `connect`."""

    def __init__(
        self, job: Job, mesh: LocalMesh, connections: Connections, liveness: Liveness
    ) -> None:
        self.rank = job.rank
        self.topology = job.topology
        self._job = job
        self._mesh = mesh
        self._poller = mesh.poller
        self._connections = connections
        self._liveness = liveness
        self._negotiate: Callable[[], None] = do_nothing
        self._local = frozenset(job.topology.peers(self.rank))
        self._closed = False
        self._polling = 0  # The thread that is in `poll`.
        self._to_close = threading.Lock()  # Is taken by the one thread that closes.
        self._one_host = len(job.topology.hosts) == 1
        # The links over which this rank sends, and those over which it only receives.
        self._control: dict[int, ControlLink] = {}
        self._one_way: list[ControlLink] = []
        self._data: dict[int, DataLink] = {}
        # The errors of ranks that could not be dialled.
        self.unreachable: dict[int, PeerLostError] = {}
        # Messages of this rank to itself.
        self._to_self: deque[Incoming] = deque()
        connections.owner = self

    # -- connections

    def expect(self, rank: int) -> ControlLink:
        """Return the link to a remote rank of the control tree; the higher rank dials it."""
        link = self._control.get(rank)
        if link is None:
            link = self._new_control(rank)
            if rank < self.rank:
                self._connections.dial(Slot(rank, CONTROL))
        return link

    def poll(self, seconds: float | None) -> bool:
        """Sleep until something occurs, at most `seconds`; return whether anything did.

        Raises `HorovodInternalError` if another thread has closed this transport.
        """
        self._polling = threading.get_ident()
        try:
            if not self._closed:
                return self._poller.poll(seconds)
            return False
        finally:
            self._polling = 0
            if self._closed:
                self._close()
                raise HorovodInternalError(
                    f"rank {self.rank} has closed its connections", rank=self.rank
                )

    def _new_control(self, rank: int) -> ControlLink:
        link = ControlLink(rank, self._poller, self._liveness, self._deliver)
        self._control[rank] = link
        return link

    def _data_link(self, rank: int) -> DataLink:
        link = self._data.get(rank)
        if link is None:
            streams = 1 if rank in self._local else self._job.streams
            ranks = (self.rank, rank)
            link = DataLink(ranks, streams, self._poller, self._liveness, self._loss)
            self._data[rank] = link
        return link

    def on_connected(self, slot: Slot, connection: socket.socket, *, dialled: bool) -> None:
        """See `Owner.on_connected`."""
        self._liveness.prepare(connection)
        rank = slot.rank
        if slot.channel == DATA:
            streams = self._data_link(rank).streams
            if slot.stream < len(streams):
                streams[slot.stream].attach(connection)
            else:
                connection.close()
        elif dialled or slot.channel == CONTROL:
            (self._control.get(rank) or self._new_control(rank)).attach(connection)
        else:
            link = ControlLink(rank, self._poller, self._liveness, self._deliver)
            self._one_way.append(link)
            link.attach(connection)

    def on_unreachable(self, slot: Slot, reasons: str) -> None:
        """See `Owner.on_unreachable`."""
        names = self._job.host_names
        error = PeerLostError(
            f"rank {self.rank} ({names[self.rank]}) cannot reach rank {slot.rank} "
            f"({names[slot.rank]}): {reasons}. {REMEDY}",
            slot.rank,
        )
        log.debug("%s", error)
        self.unreachable[slot.rank] = error
        if slot.channel == DATA:
            self._data_link(slot.rank).end(OSError(errno.EHOSTUNREACH, "unreachable"))
        else:
            self._control[slot.rank].unreachable()

    def _loss(self, rank: int, error: OSError | None) -> PeerLostError:
        """Return why the arrays of a rank cannot arrive."""
        if rank in self.unreachable:
            return self.unreachable[rank]
        if error is not None and error.errno in SILENT:
            return PeerLostError(
                f"rank {rank} ({self._job.host_names[rank]}) has not answered for "
                f"{self._liveness.limit_seconds:g} s (HVDLITE_PEER_TIMEOUT): its host or the "
                "network has failed",
                rank,
            )
        return connection_lost(rank)

    # -- control plane

    def send(self, rank: int, body: bytes) -> None:
        """See `Transport.send`."""
        if self._closed:
            return
        if rank in self._local:
            if rank == self.rank:
                self._to_self.append(Incoming(rank, bytes(body)))
            else:
                self._mesh.send(rank, body)
            return
        self._control_link(rank).send(body)

    def _control_link(self, rank: int) -> ControlLink:
        """Return the link to a remote rank; dial those that are not in the control tree."""
        link = self._control.get(rank)
        if link is None:
            link = self._new_control(rank)
            self._connections.dial(Slot(rank, CONTROL_ONE_WAY))
        return link

    def _deliver(self, message: Incoming) -> None:
        """Keep a message for `receive`; a rank is lost when all links to it are.

        A link of the rank that is about to enter may bring messages that were sent before the end
        of another link.
        """
        if message.body is None:
            links = [self._control.get(message.rank), *self._one_way]
            if any(link and link.rank == message.rank and not link.lost for link in links):
                return
            if self._connections.entering(message.rank):
                return
        self._mesh.incoming.append(message)

    def on_not_entered(self, rank: int) -> None:
        """See `Owner.on_not_entered`."""
        link = self._control.get(rank)
        if link is not None and link.lost:
            self._deliver(Incoming(rank, None))

    def wake(self, within: float = 0.0) -> None:
        """See `Transport.wake`."""
        self._mesh.wake(within)

    def receive(self, timeout: float | None) -> list[Incoming]:
        """See `Transport.receive`."""
        mesh = self._mesh
        if timeout == 0:
            self.poll(0)
            return self._take()
        deadline = None if timeout is None else time.monotonic() + timeout
        self.poll(0 if self._to_self or mesh.woken or mesh.incoming else timeout)
        while not (mesh.incoming or mesh.woken or self._to_self):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            self.poll(left)
        mesh.woken = mesh.news = False
        return self._take()

    def _take(self) -> list[Incoming]:
        messages, self._mesh.incoming = self._mesh.incoming, []
        if self._to_self:
            messages = [*self._to_self, *messages]
            self._to_self.clear()
        return messages

    # -- waits

    def call_while_waiting(self, negotiate: Callable[[], None]) -> None:
        """See `Transport.call_while_waiting`."""
        self._negotiate = negotiate

    def while_waiting(self) -> None:
        """See `Transport.while_waiting`."""
        self._negotiate()

    def _sleep(self) -> bool:
        """Sleep until something occurs, and negotiate if it concerns the control plane.

        Returns whether anything did. See [Note: negotiation while a collective waits] in engine.py.
        """
        mesh = self._mesh
        occurred = self.poll(CHECK_SECONDS)
        if not occurred or mesh.incoming or mesh.news:
            mesh.news = False
            self._negotiate()
        return occurred

    # -- arrays

    def isend(self, rank: int, array: Array) -> Pending:
        """See `Transport.isend`."""
        link = self._data_link(rank)
        self._dial_data(link, array.nbytes)
        return link.send(array)

    def irecv(self, rank: int, array: Array) -> Pending:
        """See `Transport.irecv`."""
        link = self._data_link(rank)
        self._dial_data(link, array.nbytes)
        return link.receive(array)

    def _dial_data(self, link: DataLink, nbytes: int) -> None:
        """Dial the streams that are needed for the first time; the higher rank does."""
        if link.used < len(link.streams):
            needed = link.streams_for(nbytes)
            for stream in range(link.used, needed):
                if self.rank > link.rank:
                    self._connections.dial(Slot(link.rank, DATA, stream))
            link.used = max(link.used, needed)

    def wait(self, pendings: Sequence[Pending]) -> None:
        """See `Transport.wait`."""
        for pending in pendings:
            transfer = cast(Transfer, pending)
            if not transfer.done():
                while transfer.parts:
                    if not self._sleep():
                        self._check_caller(transfer.rank)
                    transfer.check()

    def _check_caller(self, rank: int) -> None:
        """Raise `PeerLostError` if `rank`, which has to dial this one, is gone.

        A connection tells of its end, but this one is not there yet. Another one tells as well: the
        control link, which is dialled if there is none.
        """
        if self._data[rank].connected:
            return
        if rank in self._local:
            if self._mesh.gone(rank):
                raise connection_lost(rank)
        elif self._control_link(rank).lost:
            raise self._loss(rank, None)

    # -- shared memory

    def shared(self, rank: int, nbytes: int) -> NDArray[np.uint8]:
        """See `Transport.shared`."""
        return self._mesh.shared(rank, nbytes)

    def signal(self, ranks: Sequence[int]) -> None:
        """See `Transport.signal`."""
        self._mesh.signal(ranks)

    def await_signal(self, rank: int) -> None:
        """See `Transport.await_signal`."""
        attend = None if self._one_host else self._attend
        self._mesh.await_signal(rank, self._negotiate, attend=attend)

    def _attend(self) -> None:
        """Move arrays between hosts, and negotiate, while this rank waits for a local one."""
        mesh = self._mesh
        self.poll(0)
        if mesh.incoming or mesh.news:
            mesh.news = False
            self._negotiate()

    def gone(self, rank: int) -> bool:
        """See `Transport.gone`."""
        return self._mesh.gone(rank)

    # -- closing

    def close(self) -> None:
        """See `Transport.close`. Waits a little until remote ranks have all that was sent.

        Any thread may call it: one that is in `poll` meanwhile closes the connections itself.
        """
        if not self._closed:
            self._closed = True
            if self._polling in (0, threading.get_ident()):
                self._close()
            else:
                self.wake()

    def _close(self) -> None:
        if not self._to_close.acquire(blocking=False):
            return
        self._mesh.drain(GOODBYE_SECONDS)
        self._say_goodbye()
        self._mesh.close()
        self._close_sockets()

    def _say_goodbye(self) -> None:
        """Send what is queued. A connection that is closed with messages unread loses the rest."""
        links = [*self._control.values(), *self._one_way]
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
                self._poller.poll(GOODBYE_STEP_SECONDS)
            except HorovodInternalError as error:  # Nobody listens any more.
                log.debug("rank %d: %s, while closing", self.rank, error)

    def _sends_elsewhere(self, link: ControlLink) -> bool:
        """Return whether messages for the peer of `link` wait for a connection of our own.

        The peer would take the end of the only link that it knows of for the end of this rank.
        """
        return link in self._one_way and not self._control.get(link.rank, link).idle

    def _close_sockets(self) -> None:
        self._connections.close()
        for control in (*self._control.values(), *self._one_way):
            control.close()
        for data in self._data.values():
            data.close()

    def after_fork_in_child(self) -> None:
        """See `Transport.after_fork_in_child`."""
        self._mesh.after_fork_in_child()  # First: it closes the poller, which the parent shares.
        self._close_sockets()
