"""The transport of a job over TCP: sockets and shared memory inside a host, TCP between hosts.

After `connect` only the engine thread calls this transport, but for `wake`, `short_call_memory` and
`close`. It waits in one epoll for everything: wake-ups, Unix sockets, listeners, control messages
and arrays; nothing is asked again and again.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from hvdlite.common.base.errors import HorovodInternalError, PeerLostError
from hvdlite.common.base.topology import Topology
from hvdlite.common.connections.liveness import Liveness
from hvdlite.common.transport.base import (
    CHECK_SECONDS,
    Array,
    Incoming,
    Pending,
    connection_lost,
    do_nothing,
)
from hvdlite.common.transport.local import LocalMesh
from hvdlite.common.transport.tcp.connections import DATA, Connections, Slot
from hvdlite.common.transport.tcp.control import GOODBYE_SECONDS, ControlLinks
from hvdlite.common.transport.tcp.streams import DataLink, Transfer

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
        self.wake, self.signal, self.gone = mesh.wake, mesh.signal, mesh.gone
        self.shared, self.short_call_memory = mesh.shared, mesh.short_call_memory
        self._poller = mesh.poller
        self._connections = connections
        self._liveness = liveness
        self._negotiate: Callable[[], None] = do_nothing
        self._local = frozenset(job.topology.peers(self.rank))
        self._closed = False
        self._polling = 0  # The thread that is in `poll`.
        self._to_close = threading.Lock()  # Is taken by the one thread that closes.
        self._one_host = len(job.topology.hosts) == 1
        self.control = ControlLinks(
            job.rank, mesh.poller, liveness, connections, mesh.incoming.append
        )
        self._data: dict[int, DataLink] = {}
        # The errors of ranks that could not be dialled.
        self.unreachable: dict[int, PeerLostError] = {}
        connections.connected, connections.unreachable = self._on_connected, self._on_unreachable
        connections.not_entered = self.control.on_not_entered

    # -- connections

    def poll(self, seconds: float | None) -> bool:
        """Sleep until something occurs, at most `seconds`; return whether anything did.

        Raises `HorovodInternalError` if another thread has closed this transport.
        """
        self._polling = threading.get_ident()
        try:
            if not self._closed:
                return self._poller.run_once(seconds)
            return False
        finally:
            self._polling = 0
            if self._closed:
                self._close()
                raise HorovodInternalError(
                    f"rank {self.rank} has closed its connections", rank=self.rank
                )

    def _data_link(self, rank: int) -> DataLink:
        link = self._data.get(rank)
        if link is None:
            streams = 1 if rank in self._local else self._job.streams
            ranks = (self.rank, rank)
            dial = self._connections.dial if rank < self.rank else None
            link = DataLink(ranks, streams, self._poller, self._liveness, self._loss, dial)
            self._data[rank] = link
        return link

    def _on_connected(self, slot: Slot, connection: socket.socket, dialled: bool) -> None:
        self._liveness.prepare(connection)
        rank = slot.rank
        if slot.channel == DATA:
            streams = self._data_link(rank).streams
            if slot.stream < len(streams):
                streams[slot.stream].attach(connection)
            else:
                connection.close()
        else:
            self.control.attach(slot, connection, dialled=dialled)

    def _on_unreachable(self, slot: Slot, reasons: str) -> None:
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
            self.control.link(slot.rank).end()

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
        if self._closed:
            return
        if rank == self.rank:
            self._mesh.incoming.append(Incoming(rank, bytes(body)))
        elif rank in self._local:
            self._mesh.send(rank, body)
        else:
            self.control.link(rank).send(body)

    def receive(self, timeout: float | None) -> list[Incoming]:
        mesh = self._mesh
        if timeout == 0:
            self.poll(0)
            return mesh.take()
        deadline = None if timeout is None else time.monotonic() + timeout
        left = 0 if mesh.woken or mesh.incoming else timeout
        while True:
            self.poll(left)
            left = None if deadline is None else deadline - time.monotonic()
            if mesh.incoming or mesh.woken or (left is not None and left <= 0):
                mesh.woken = mesh.news = False
                return mesh.take()

    # -- waits

    def call_while_waiting(self, negotiate: Callable[[], None]) -> None:
        self._negotiate = negotiate

    def while_waiting(self) -> None:
        if not self._one_host:
            self.poll(0)
        self._negotiate()

    def _sleep(self) -> bool:
        """Sleep until something occurs, and negotiate if it concerns the control plane.

        Returns whether anything did. See [Note: negotiation while a collective waits] in engine.py.
        """
        occurred = self.poll(CHECK_SECONDS)
        if self._mesh.pop_news() or not occurred:
            self._negotiate()
        return occurred

    # -- arrays

    def isend(self, rank: int, array: Array) -> Pending:
        return self._data_link(rank).send(array)

    def irecv(self, rank: int, array: Array) -> Pending:
        return self._data_link(rank).receive(array)

    def wait(self, pendings: Sequence[Pending]) -> None:
        for pending in pendings:
            transfer = cast(Transfer, pending)
            if not transfer.done():
                while transfer.parts:
                    if not self._sleep():
                        self._check_caller(transfer.rank)
                    transfer.check()

    def wait_for_any(self, pendings: Sequence[Pending]) -> None:
        while not any(pending.done() for pending in pendings):
            if not self._sleep():
                for pending in pendings:
                    self._check_caller(pending.rank)

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
        elif self.control.link(rank).lost:
            raise self._loss(rank, None)

    # -- shared memory

    def await_signal(self, rank: int) -> None:
        attend = None if self._one_host else self._attend
        self._mesh.await_signal(rank, self._negotiate, attend=attend)

    def _attend(self) -> None:
        """Move arrays between hosts, and negotiate, while this rank waits for a local one."""
        self.poll(0)
        if self._mesh.pop_news():
            self._negotiate()

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
        self.control.say_goodbye()
        self._mesh.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._connections.close()
        self.control.close()
        for data in self._data.values():
            data.close()

    def after_fork_in_child(self) -> None:
        self._mesh.after_fork_in_child()  # First: it closes the poller, which the parent shares.
        self._close_sockets()
