"""Control messages between hosts: sent over MPI without blocking, and received as a whole."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.transport.backoff import Backoff
from hvdlite.common.transport.base import Incoming
from hvdlite.common.transport.mpi_failures import RemoteFailures

if TYPE_CHECKING:
    from mpi4py import MPI

BODY, GOODBYE = 1, 2  # Tags of messages. A goodbye closes the connection, as MPI shows no close.


class RemoteMessages:
    """The control messages of this rank to and from remote ranks."""

    def __init__(
        self, mpi: Any, comm: MPI.Intracomm, ranks: set[int], failures: RemoteFailures
    ) -> None:
        """Exchange messages with `ranks` of `comm`."""
        self._mpi = mpi
        self._comm = comm
        self.ranks = ranks
        self._failures = failures
        # Requests under way. MPI reads a message that is sent, and writes one that is received,
        # until its request is complete: its memory must stay referenced until then.
        self._sends: deque[tuple[MPI.Request, bytes]] = deque()
        self._receives: deque[tuple[MPI.Request, int, int, bytearray]] = deque()
        # Remote ranks that have died or said goodbye.
        self._lost: set[int] = set()

    def send(self, rank: int, body: bytes) -> None:
        """Start to send `body` to a remote rank; nothing is sent to a rank that is lost."""
        if rank not in self._lost:
            self._send(rank, body, BODY)

    def _send(self, rank: int, body: bytes, tag: int) -> None:
        try:
            request = self._comm.Isend([body, self._mpi.BYTE], rank, tag)
        except self._mpi.Exception as error:
            self._failures.check_is_death(error, rank)
        else:
            self._sends.append((request, body))

    def receive(self) -> list[Incoming]:
        """Return the messages that have arrived completely, and the ranks that were lost."""
        mpi, status = self._mpi, self._mpi.Status()
        messages = []
        try:
            # A matched probe takes the message out of MPI, so that its size is known before it is
            # received. Messages of one rank arrive in order, so only the first is tested.
            while message := self._comm.Improbe(mpi.ANY_SOURCE, mpi.ANY_TAG, status):
                body = bytearray(status.Get_count(mpi.BYTE))
                request = message.Irecv([body, mpi.BYTE])
                self._receives.append((request, status.source, status.tag, body))
            while self._receives and self._receives[0][0].Test():
                _, rank, tag, body = self._receives.popleft()
                messages.append(self._incoming(rank, tag, bytes(body)))
        except mpi.Exception as error:
            self._failures.check_is_death(error, None)
            dead = self._failures.dead()
            self._receives = deque(r for r in self._receives if r[1] not in dead)
        for rank in self._failures.search(self.ranks - self._lost):
            self._lost.add(rank)
            messages.append(Incoming(rank, None))
        return messages

    def _incoming(self, rank: int, tag: int, body: bytes) -> Incoming:
        if tag == BODY:
            return Incoming(rank, body)
        if tag != GOODBYE or body:
            raise ProtocolError(f"rank {rank} sent a foreign message, tag {tag}", rank)
        self._lost.add(rank)
        return Incoming(rank, None)

    def progress(self) -> None:
        """Forget the messages that were sent completely."""
        while self._sends:
            try:
                if not self._sends[0][0].Test():
                    return
            except self._mpi.Exception as error:
                self._failures.check_is_death(error, None)
            self._sends.popleft()

    def close(self, timeout: float) -> bool:
        """Say goodbye, and wait until all remote ranks do; return whether they did in time."""
        for rank in self.ranks - self._failures.dead():
            self._send(rank, b"", GOODBYE)
        deadline = time.monotonic() + timeout
        backoff = Backoff()
        while self._sends or self.ranks - self._lost:
            if time.monotonic() > deadline:
                return False
            self.receive()
            self.progress()
            time.sleep(backoff.seconds())
        return True
