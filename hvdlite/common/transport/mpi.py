"""The transport of a job over MPI: sockets and shared memory inside a host, MPI between hosts.

After `connect` only the engine thread calls this transport, and so MPI. MPI cannot block without
spinning, so waits poll it and sleep between polls, longer the longer nothing arrives. Ranks whose
peers are all local never poll MPI when they are idle.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.topology import Topology
from hvdlite.common.meeting.exchange import MpiExchange
from hvdlite.common.meeting.placement import host_identity
from hvdlite.common.settings.config import Config
from hvdlite.common.transport.base import Array, Incoming, Pending, connection_lost, do_nothing
from hvdlite.common.transport.bootstrap import exchange_versions, find_hosts
from hvdlite.common.transport.local import LocalMesh
from hvdlite.common.transport.mpi_messages import Backoff, RemoteFailures, RemoteMessages

if TYPE_CHECKING:
    from mpi4py import MPI

DATA = 3  # The tag of arrays.
PART_BYTES = 1 << 30  # MPI counts to 2^31.
# MPI sends a small message at once (eager protocol). For a large one it asks the receiver first
# (rendezvous protocol), and over TCP both the question and the answer wait behind all data in
# flight, while the link runs dry. So arrays up to PROMPT_BYTES are sent in eager parts. Larger ones
# ask first, so that a receiver that is not ready needs no memory for them.
PROMPT_BYTES = 256 << 10
PROMPT_PART_BYTES = 63 << 10  # Open MPI asks from 64 KiB on with its own header, others later.
GOODBYE_SECONDS = 2.0  # The longest wait of `close` for remote ranks.
POLL_RESOLUTION = 1e-3  # In seconds: poll() counts milliseconds.
POLL_SECONDS = 0.001  # Between two looks whether all ranks have come.

# Duplications that some ranks did not join in time: (communicator, its copy, the request). Such a
# rank may still come, and joins the oldest of them, so the next `init` goes on with that one.
_unfinished: list[tuple[MPI.Intracomm, MPI.Intracomm, MPI.Request]] = []


def connect(
    control: MPI.Intracomm, config: Config, give_up: Callable[[], HorovodInternalError]
) -> MpiTransport:
    """Return the transport of a job whose ranks are those of `control`; collective over them.

    `control` is a duplicate made by `duplicate`, and belongs to the transport afterwards.

    Raises what `give_up` returns when some ranks do not come within
    `config.start_timeout_seconds`, and `HorovodVersionMismatchError`.
    """
    deadline = time.monotonic() + config.start_timeout_seconds
    exchange = MpiExchange(control)
    exchange_versions(exchange)
    data = duplicate(control, deadline, give_up)
    topology, mesh = find_hosts(exchange, host_identity(), deadline)
    return MpiTransport(control, data, topology, mesh)


def duplicate(
    comm: MPI.Intracomm, deadline: float, give_up: Callable[[], HorovodInternalError]
) -> MPI.Intracomm:
    """Return a communicator of our own, whose errors are exceptions.

    Raises what `give_up` returns when some ranks have not come by `deadline` (monotonic seconds).
    """
    from mpi4py import MPI

    waiting = next((duplication for duplication in _unfinished if duplication[0] == comm), None)
    if waiting is None:
        waiting = (comm, *comm.Idup())
        _unfinished.append(waiting)
    _, copy, request = waiting
    while not request.Test():
        if time.monotonic() > deadline:
            raise give_up()
        time.sleep(POLL_SECONDS)
    _unfinished.remove(waiting)
    copy.Set_errhandler(MPI.ERRORS_RETURN)
    return copy


class _ArrayInFlight:
    """An array that is sent to or received from `rank`, as one MPI request or several."""

    def __init__(self, transport: MpiTransport, rank: int, requests: list[MPI.Request]) -> None:
        self.rank, self._transport, self._requests = rank, transport, requests

    def done(self) -> bool:
        requests = self._requests
        while requests and self._transport.test(requests[-1], self.rank):
            requests.pop()
        return not requests


class MpiTransport:
    """One rank of a job over MPI; made by `connect`."""

    def __init__(
        self, control: MPI.Intracomm, data: MPI.Intracomm, topology: Topology, mesh: LocalMesh
    ) -> None:
        from mpi4py import MPI

        self.mpi = MPI
        self.rank: int = control.rank
        self.topology = topology
        self._negotiate: Callable[[], None] = do_nothing
        self._control, self._data = control, data
        self._mesh = mesh
        self.wake, self.signal, self.gone = mesh.wake, mesh.signal, mesh.gone
        self.shared, self.short_call_memory = mesh.shared, mesh.short_call_memory
        local = set(topology.peers(self.rank))
        self._remote = {rank for rank in range(topology.size) if rank not in local}
        self._failures = RemoteFailures(MPI, control)
        self._messages = RemoteMessages(MPI, control, self._remote, self._failures)
        # Messages of this rank to itself.
        self._to_self: deque[Incoming] = deque()
        # Arrays to and from remote ranks; those that are complete are removed in order.
        self._moving: deque[_ArrayInFlight] = deque()
        # By members, for collectives of MPI itself.
        self._subcommunicators: dict[tuple[int, ...], MPI.Intracomm] = {}

    # -- control plane

    def send(self, rank: int, body: bytes) -> None:
        if rank == self.rank:
            self._to_self.append(Incoming(rank, bytes(body)))
        elif rank in self._remote:
            self._messages.send(rank, body)
        else:
            self._mesh.send(rank, body)

    def receive(self, timeout: float | None) -> list[Incoming]:
        if timeout == 0:
            return self._poll(0.0)
        if not self._remote:  # All peers are local: one poll() sleeps for all of them.
            messages = self._poll(0.0 if self._mesh.woken else timeout)
            self._mesh.woken = False
            return messages
        deadline = None if timeout is None else time.monotonic() + timeout
        messages = self._poll(0.0)
        backoff = Backoff()
        while not messages and not self._mesh.woken:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            seconds = backoff.seconds() if left is None else min(backoff.seconds(), left)
            if seconds < POLL_RESOLUTION:  # Too short for poll().
                time.sleep(seconds)
                seconds = 0.0
            messages = self._poll(seconds)
        self._mesh.woken = False
        return messages

    def _poll(self, timeout: float | None) -> list[Incoming]:
        """Return all messages that are there; if there are none, sleep for local ones."""
        messages = list(self._to_self)
        self._to_self.clear()
        if self._remote:
            messages += self._messages.receive()
            self._messages.progress()
        return messages + self._mesh.receive(0.0 if messages else timeout)

    # -- waits

    def call_while_waiting(self, negotiate: Callable[[], None]) -> None:
        self._negotiate = negotiate

    def while_waiting(self) -> None:
        self._keep_moving()
        self._negotiate()

    # -- arrays

    def isend(self, rank: int, array: Array) -> Pending:
        return self._start(self._data.Isend, rank, array)

    def irecv(self, rank: int, array: Array) -> Pending:
        return self._start(self._data.Irecv, rank, array)

    def _start(self, call: Callable[..., MPI.Request], rank: int, array: Array) -> Pending:
        raw = array.view(np.uint8)
        prompt = rank in self._remote and raw.size <= PROMPT_BYTES
        length = PROMPT_PART_BYTES if prompt else PART_BYTES
        parts = [raw[start : start + length] for start in range(0, raw.size, length)]
        try:
            requests = [call([part, self.mpi.BYTE], rank, DATA) for part in parts]
        except self.mpi.Exception as error:
            raise self._failures.error_of(error, rank) from error
        array_in_flight = _ArrayInFlight(self, rank, requests)
        if rank in self._remote:
            self._keep_moving()
            self._moving.append(array_in_flight)
        return array_in_flight

    def test(self, request: MPI.Request, rank: int | None) -> bool:
        """Return whether `request` is complete. Raises `PeerLostError` naming the dead rank."""
        try:
            return bool(request.Test())
        except self.mpi.Exception as error:
            raise self._failures.error_of(error, rank) from error

    def wait(self, pendings: Sequence[Pending]) -> None:
        for pending in pendings:
            self._sleep_until(pending.done, (pending.rank,))

    def wait_for_any(self, pendings: Sequence[Pending]) -> None:
        ranks = [pending.rank for pending in pendings]
        self._sleep_until(lambda: any(pending.done() for pending in pendings), ranks)

    def _sleep_until(self, done: Callable[[], bool], ranks: Sequence[int]) -> None:
        """Sleep until `done`, which needs all of `ranks` alive.

        See [Note: negotiation while a collective waits] in engine.py.
        """
        backoff = Backoff()
        while not done():
            time.sleep(backoff.seconds())
            if backoff.check_is_due():
                dead = self._failures.dead()
                for rank in ranks:
                    # A rank may close after it has sent all: so ask `done` once more.
                    if (rank in dead or self._mesh.gone(rank)) and not done():
                        self._failures.occurred = True
                        raise connection_lost(rank)
                self._negotiate()

    # -- collectives of MPI itself

    def subcommunicator(self, members: tuple[int, ...]) -> MPI.Intracomm:
        """Return a communicator of `members`, who all call this in the same order."""
        comm = self._subcommunicators.get(members)
        if comm is None:
            everyone = self._data.Get_group()
            group = everyone.Incl(members)
            comm = self._data.Create_group(group)
            comm.Set_errhandler(self.mpi.ERRORS_RETURN)
            self._subcommunicators[members] = comm
            group.Free()
            everyone.Free()
        return comm

    def finish(self, request: MPI.Request, members: Sequence[int]) -> None:
        """Sleep until a collective among `members` is complete. Raises `PeerLostError`."""
        self._sleep_until(lambda: self.test(request, None), members)

    # -- shared memory

    def await_signal(self, rank: int) -> None:
        if not self._keep_moving():
            self._mesh.await_signal(rank, self._negotiate)
            return
        backoff = Backoff()

        def negotiate_and_move() -> None:  # May be called more often than every CHECK_SECONDS.
            self._keep_moving()
            if backoff.check_is_due():
                self._negotiate()

        self._mesh.await_signal(rank, negotiate_and_move, POLL_RESOLUTION)

    def _keep_moving(self) -> bool:
        """Return whether arrays are in flight between hosts: MPI moves them only within calls."""
        while self._moving and self._moving[0].done():
            self._moving.popleft()
        return bool(self._moving)

    # -- closing

    def close(self) -> None:
        """See `Transport.close`. Waits a little for remote ranks to close as well."""
        self._mesh.drain(GOODBYE_SECONDS)
        self._mesh.close()
        if self.mpi.Is_finalized():  # The user has finalized MPI before shutdown().
            return
        said_goodbye = self._messages.close(GOODBYE_SECONDS)
        # MPI gives the context of a freed communicator to the next one. A late message would then
        # reach the next job of this process: so free them only after all ranks have said goodbye.
        if said_goodbye and not self._failures.occurred:
            for comm in (*self._subcommunicators.values(), self._data, self._control):
                comm.Free()
        self._subcommunicators.clear()

    def after_fork_in_child(self) -> None:
        """See `Transport.after_fork_in_child`. The child leaves MPI alone."""
        self._mesh.after_fork_in_child()


__all__ = ["MpiTransport", "connect"]
