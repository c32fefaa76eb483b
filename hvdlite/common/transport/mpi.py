"""The transport of a job over MPI: sockets and shared memory inside a host, MPI between hosts.

After `connect` only the engine thread calls this, and so MPI. MPI has no way to sleep until a
message comes without spinning, so its waits look, and sleep ever longer while nothing comes. Ranks
whose peers are all local never look at MPI when they are idle.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.base.errors import HorovodInternalError, ProtocolError
from hvdlite.common.base.topology import Topology
from hvdlite.common.plain.config import Config
from hvdlite.common.transport.base import (
    CHECK_SECONDS,
    Array,
    Incoming,
    Pending,
    connection_lost,
    do_nothing,
)
from hvdlite.common.transport.bootstrap import duplicate, exchange_versions, find_hosts
from hvdlite.common.transport.local import LocalMesh

if TYPE_CHECKING:
    from mpi4py import MPI

BODY, GOODBYE = 1, 2  # tags of control messages; a goodbye ends the connection
DATA = 3
PART_BYTES = 1 << 30  # MPI counts to 2^31
# MPI sends a small message at once. For a large one it asks the receiver first, and over TCP both
# the question and the answer wait behind all the data that is under way: the link runs dry. So what
# is not too large goes in parts that are small in this sense. The rest asks, so that a receiver
# that is not ready needs no memory for it.
PROMPT_BYTES = 256 << 10
PROMPT_PART_BYTES = 63 << 10  # Open MPI asks from 64 KiB on, with its own header, and others later
# A nap is a share of the time that nothing has come: the delay that it can add. Up to BUSY_NAP the
# share is large; longer naps, which an idle job takes, are a small share. All in seconds.
SHORTEST_NAP, BUSY_NAP, LONGEST_NAP = 20e-6, 4e-3, 20e-3
BUSY_SHARE, IDLE_SHARE = 1 / 8, 1 / 64
GOODBYE_SECONDS = 2.0
POLL_RESOLUTION = 1e-3  # seconds; poll() counts milliseconds


def connect(
    comm: MPI.Intracomm, config: Config, give_up: Callable[[], HorovodInternalError]
) -> MpiTransport:
    """The transport of a job whose ranks are those of `comm`; collective over `comm`.

    Raises what `give_up` returns when some ranks do not come within
    `config.start_timeout_seconds`, and `HorovodVersionMismatchError`.
    """
    deadline = time.monotonic() + config.start_timeout_seconds
    control = duplicate(comm, deadline, give_up)
    exchange_versions(control)
    data = duplicate(control, deadline, give_up)
    topology, mesh = find_hosts(control, deadline)
    return MpiTransport(control, data, topology, mesh)


class Nap:
    """Sleeps that grow while nothing comes."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._next_check = self._start + CHECK_SECONDS

    def seconds(self) -> float:
        """How long to sleep now."""
        waited = time.monotonic() - self._start
        busy = min(max(waited * BUSY_SHARE, SHORTEST_NAP), BUSY_NAP)
        return min(max(waited * IDLE_SHARE, busy), LONGEST_NAP)

    def check_is_due(self) -> bool:
        """True every CHECK_SECONDS."""
        now = time.monotonic()
        if now < self._next_check:
            return False
        self._next_check = now + CHECK_SECONDS
        return True


class _Message:
    """An array under way to `rank`, or from it, as one MPI request or several."""

    def __init__(self, transport: MpiTransport, rank: int, requests: list[MPI.Request]) -> None:
        self.rank = rank
        self._transport = transport
        self._requests = requests

    def done(self) -> bool:
        """See `Pending.done`."""
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
        local = set(topology.peers(self.rank))
        self._remote = {rank for rank in range(topology.size) if rank not in local}
        self._own: deque[Incoming] = deque()  # to this rank itself
        self._sends: deque[tuple[MPI.Request, bytes]] = deque()  # control messages under way
        self._receiving: deque[tuple[MPI.Request, int, int, bytearray]] = deque()
        self._moving: deque[_Message] = deque()  # arrays to and from remote ranks, maybe all gone
        self._lost: set[int] = set()  # remote ranks that have gone or said goodbye
        self._subcommunicators: dict[tuple[int, ...], MPI.Intracomm] = {}
        self._next_failures = 0.0  # monotonic seconds
        self._detects_failures = self._can_detect_failures()
        self._failed = False

    # -- control plane

    def send(self, rank: int, body: bytes) -> None:
        """See `Transport.send`."""
        if rank == self.rank:
            self._own.append(Incoming(rank, bytes(body)))
        elif rank in self._remote:
            if rank not in self._lost:
                self._send_remote(rank, body, BODY)
        else:
            self._mesh.send(rank, body)

    def _send_remote(self, rank: int, body: bytes, tag: int) -> None:
        try:
            request = self._control.Isend([body, self.mpi.BYTE], rank, tag)
        except self.mpi.Exception as error:
            self._must_be_failure(error, rank)
        else:
            self._sends.append((request, body))

    def wake(self, within: float = 0.0) -> None:
        """See `Transport.wake`."""
        self._mesh.wake(within)

    def receive(self, timeout: float | None) -> list[Incoming]:
        """See `Transport.receive`."""
        if timeout == 0:
            return self._look(0.0)
        if not self._remote:  # one poll() is enough
            messages = self._look(0.0 if self._mesh.woken else timeout)
            self._mesh.woken = False
            return messages
        return self._receive_of_any_host(timeout)

    def _receive_of_any_host(self, timeout: float | None) -> list[Incoming]:
        deadline = None if timeout is None else time.monotonic() + timeout
        messages = self._look(0.0)
        nap = Nap()
        while not messages and not self._mesh.woken:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            messages = self._look(self._pause(nap, left))
        self._mesh.woken = False
        return messages

    def _pause(self, nap: Nap, left: float | None) -> float:
        """How long to sleep for local events; what poll() cannot measure is slept here."""
        seconds = nap.seconds() if left is None else min(nap.seconds(), left)
        if seconds >= POLL_RESOLUTION:
            return seconds
        time.sleep(seconds)
        return 0.0

    def _look(self, timeout: float | None) -> list[Incoming]:
        """All messages that are there; sleeps for local ones if there are none."""
        messages = list(self._own)
        self._own.clear()
        if self._remote:
            messages += self._look_at_mpi()
        self._progress()
        return messages + self._mesh.receive(0.0 if messages else timeout)

    def _look_at_mpi(self) -> list[Incoming]:
        """The messages of remote ranks that have come as a whole."""
        mpi, status = self.mpi, self.mpi.Status()
        messages = []
        try:
            while message := self._control.Improbe(mpi.ANY_SOURCE, mpi.ANY_TAG, status):
                body = bytearray(status.Get_count(mpi.BYTE))
                request = message.Irecv([body, mpi.BYTE])
                self._receiving.append((request, status.source, status.tag, body))
            while self._receiving and self._receiving[0][0].Test():
                _, rank, tag, body = self._receiving.popleft()
                messages.append(self._incoming(rank, tag, bytes(body)))
        except mpi.Exception as error:
            self._must_be_failure(error, None)
            self._drop_broken()
        return messages + self._failures()

    def _drop_broken(self) -> None:
        """Forget the messages that dead ranks will not end."""
        dead = self._dead()
        self._receiving = deque(each for each in self._receiving if each[1] not in dead)

    def _incoming(self, rank: int, tag: int, body: bytes) -> Incoming:
        if tag == BODY:
            return Incoming(rank, body)
        if tag != GOODBYE or body:
            raise ProtocolError(f"rank {rank} sent a foreign message, tag {tag}", rank)
        self._lost.add(rank)
        return Incoming(rank, None)

    def _progress(self) -> None:
        """Forget the control messages that have left."""
        while self._sends:
            try:
                if not self._sends[0][0].Test():
                    return
            except self.mpi.Exception as error:
                self._must_be_failure(error, None)
            self._sends.popleft()

    # -- failures of remote ranks

    def _can_detect_failures(self) -> bool:
        """Whether this MPI tells which ranks have died (ULFM)."""
        try:
            self._control.Get_failed().Free()
        except (self.mpi.Exception, NotImplementedError):
            return False
        return True

    def _dead(self) -> set[int]:
        """The ranks that MPI knows to be dead."""
        if not self._detects_failures:
            return set()
        failed, everyone = self._control.Get_failed(), self._control.Get_group()
        try:
            return set(failed.Translate_ranks(list(range(failed.size)), everyone))
        finally:
            failed.Free()
            everyone.Free()

    def _failures(self) -> list[Incoming]:
        """The remote ranks that have died; looked for every CHECK_SECONDS, as it costs time."""
        now = time.monotonic()
        if now < self._next_failures:
            return []
        self._next_failures = now + CHECK_SECONDS
        new = sorted((self._dead() & self._remote) - self._lost)
        if new:
            self._failed = True
            self._lost.update(new)
            self._control.Ack_failed()  # so that a probe of any source works again
        return [Incoming(rank, None) for rank in new]

    def _must_be_failure(self, error: MPI.Exception, rank: int | None) -> None:
        """Pass over the death of a rank, which `receive` reports; raise anything else."""
        self._failed = True
        deaths = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
        if error.Get_error_class() not in {getattr(self.mpi, name, -1) for name in deaths}:
            place = "" if rank is None else f" to rank {rank}"
            raise HorovodInternalError(f"MPI failed{place}: {error}", rank) from error

    # -- waits

    def call_while_waiting(self, negotiate: Callable[[], None]) -> None:
        """See `Transport.call_while_waiting`."""
        self._negotiate = negotiate

    def while_waiting(self) -> None:
        """See `Transport.while_waiting`."""
        self._negotiate()

    # -- arrays

    def isend(self, rank: int, array: Array) -> Pending:
        """See `Transport.isend`."""
        return self._start(self._data.Isend, rank, array)

    def irecv(self, rank: int, array: Array) -> Pending:
        """See `Transport.irecv`."""
        return self._start(self._data.Irecv, rank, array)

    def _start(self, call: Callable[..., MPI.Request], rank: int, array: Array) -> Pending:
        raw = array.view(np.uint8)
        prompt = rank in self._remote and raw.size <= PROMPT_BYTES
        length = PROMPT_PART_BYTES if prompt else PART_BYTES
        parts = [raw[start : start + length] for start in range(0, raw.size, length)]
        try:
            requests = [call([part, self.mpi.BYTE], rank, DATA) for part in parts]
        except self.mpi.Exception as error:
            raise self._lost_or_broken(error, rank) from error
        message = _Message(self, rank, requests)
        if rank in self._remote:
            self._keep_moving()
            self._moving.append(message)
        return message

    def test(self, request: MPI.Request, rank: int | None) -> bool:
        """Whether `request` has ended. Raises `PeerLostError` naming `rank`, or who is dead."""
        try:
            return bool(request.Test())
        except self.mpi.Exception as error:
            raise self._lost_or_broken(error, rank) from error

    def _lost_or_broken(self, error: MPI.Exception, rank: int | None) -> HorovodInternalError:
        if error.Get_error_class() == self.mpi.ERR_TRUNCATE:
            return ProtocolError(f"rank {rank} sent more than was expected", rank)
        self._must_be_failure(error, rank)
        dead = self._dead()
        if rank is None or (dead and rank not in dead):
            rank = min(dead, default=self.rank)
        return connection_lost(rank)

    def wait(self, pendings: Sequence[Pending]) -> None:
        """See `Transport.wait`."""
        for pending in pendings:
            self._sleep_until(pending.done, (pending.rank,))

    def _sleep_until(self, done: Callable[[], bool], ranks: Sequence[int]) -> None:
        """Sleep until `done`, which needs all of `ranks` alive."""
        nap = Nap()
        while not done():
            time.sleep(nap.seconds())
            if nap.check_is_due():
                dead = self._dead()
                for rank in ranks:
                    if (rank in dead or self._mesh.gone(rank)) and not done():
                        self._failed = True
                        raise connection_lost(rank)
                self._negotiate()

    # -- collectives of MPI itself

    def subcommunicator(self, members: tuple[int, ...]) -> MPI.Intracomm:
        """A communicator of `members`, who all call this in the same order."""
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
        """Sleep until a collective among `members` has ended. Raises `PeerLostError`."""
        self._sleep_until(lambda: self.test(request, None), members)

    # -- shared memory

    def shared(self, rank: int, nbytes: int) -> NDArray[np.uint8]:
        """See `Transport.shared`."""
        return self._mesh.shared(rank, nbytes)

    def signal(self, ranks: Sequence[int]) -> None:
        """See `Transport.signal`."""
        self._mesh.signal(ranks)

    def await_signal(self, rank: int) -> None:
        """See `Transport.await_signal`."""
        if self._keep_moving():
            self._mesh.await_signal(rank, self._negotiate_and_move(), POLL_RESOLUTION)
        else:
            self._mesh.await_signal(rank, self._negotiate)

    def _keep_moving(self) -> bool:
        """Whether arrays are under way between hosts; MPI moves them only while it is called."""
        while self._moving and self._moving[0].done():
            self._moving.popleft()
        return bool(self._moving)

    def _negotiate_and_move(self) -> Callable[[], None]:
        """Return what a wait may call more often than every CHECK_SECONDS."""
        nap = Nap()

        def negotiate_and_move() -> None:
            self._keep_moving()
            if nap.check_is_due():
                self._negotiate()

        return negotiate_and_move

    def gone(self, rank: int) -> bool:
        """See `Transport.gone`."""
        return self._mesh.gone(rank)

    # -- the end

    def close(self) -> None:
        """See `Transport.close`. Waits a little for remote ranks to close as well."""
        self._mesh.drain(GOODBYE_SECONDS)
        self._mesh.close()
        if self.mpi.Is_finalized():  # by the user, before the end of the job
            return
        said_goodbye = self._say_goodbye()
        # A communicator's number is used again once it is freed. What a rank sends late would then
        # reach the next job in this process: so it is freed only when everybody has said goodbye.
        if said_goodbye and not self._failed:
            for comm in (*self._subcommunicators.values(), self._data, self._control):
                comm.Free()
        self._subcommunicators.clear()

    def _say_goodbye(self) -> bool:
        """Whether all remote ranks have said goodbye too, now or before."""
        for rank in self._remote - self._dead():
            self._send_remote(rank, b"", GOODBYE)
        deadline = time.monotonic() + GOODBYE_SECONDS
        nap = Nap()
        while self._sends or self._remote - self._lost:
            if time.monotonic() > deadline:
                return False
            self._look_at_mpi()
            self._progress()
            time.sleep(nap.seconds())
        return True

    def after_fork_in_child(self) -> None:
        """See `Transport.after_fork_in_child`. The child leaves MPI alone."""
        self._mesh.after_fork_in_child()


__all__ = ["MpiTransport", "connect"]
