"""Control messages between hosts over MPI, the sleeps between polls, and the failures it reports.

Messages are sent without blocking, and received as a whole.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from hvdlite.common.base.errors import HorovodInternalError, ProtocolError
from hvdlite.common.transport.base import CHECK_SECONDS, Incoming, connection_lost

if TYPE_CHECKING:
    from mpi4py import MPI

# -- sleeps between polls

# MPI cannot block without spinning, so waits poll it. A sleep is a share of the time since
# something came last: the share is the delay that sleeping can add. Short sleeps may be a large
# share; longer ones, which an idle job makes, are a small share, so that an idle rank costs nearly
# no time.
SHORTEST_SLEEP, BUSY_SLEEP, LONGEST_SLEEP = 20e-6, 4e-3, 20e-3  # In seconds.
BUSY_SHARE, IDLE_SHARE = 1 / 8, 1 / 64  # The first one up to BUSY_SLEEP, then the second one.


class Backoff:
    """The sleeps of one wait."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._next_check = self._start + CHECK_SECONDS

    def seconds(self) -> float:
        """Return how long to sleep now."""
        waited = time.monotonic() - self._start
        busy = min(max(waited * BUSY_SHARE, SHORTEST_SLEEP), BUSY_SLEEP)
        return min(max(waited * IDLE_SHARE, busy), LONGEST_SLEEP)

    def check_is_due(self) -> bool:
        """Return True every CHECK_SECONDS, for checks that are too slow for every poll."""
        now = time.monotonic()
        if now < self._next_check:
            return False
        self._next_check = now + CHECK_SECONDS
        return True


# -- the failures of remote ranks, as far as MPI reports them

# An MPI with user-level failure mitigation (ULFM: Bland, Bouteiller, Herault, Bosilca and Dongarra,
# "Post-failure recovery of MPI communication capability", 2013) survives the death of a rank: calls
# that need the rank raise an error, and the others can ask which ranks have died. With any other
# MPI the launcher notices the death, and ends the job.
_DEATHS = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")


class RemoteFailures:
    """Which ranks of a communicator have died, and what the errors of MPI mean."""

    def __init__(self, mpi: Any, comm: MPI.Intracomm) -> None:
        self._mpi = mpi
        self._comm = comm
        self._rank: int = comm.rank
        # Whether anything of MPI has failed. Then no communicator is freed at the end: freeing is
        # collective, and would wait for dead ranks.
        self.occurred = False
        self._next_search = 0.0  # Monotonic seconds.
        self._detects = True  # Whether this MPI tells which ranks have died.
        try:
            comm.Get_failed().Free()
        except (mpi.Exception, NotImplementedError):
            self._detects = False
        self._deaths = {getattr(mpi, name, -1) for name in _DEATHS}

    def dead(self) -> set[int]:
        """Return the ranks that MPI knows to be dead."""
        if not self._detects:
            return set()
        failed, everyone = self._comm.Get_failed(), self._comm.Get_group()
        try:
            return set(failed.Translate_ranks(list(range(failed.size)), everyone))
        finally:
            failed.Free()
            everyone.Free()

    def search(self, alive: set[int]) -> list[int]:
        """Return which of the ranks `alive` have died since.

        MPI is asked only every CHECK_SECONDS, as the question takes time.
        """
        now = time.monotonic()
        if now < self._next_search:
            return []
        self._next_search = now + CHECK_SECONDS
        dead = sorted(self.dead() & alive)
        if dead:
            self.occurred = True
            self._comm.Ack_failed()  # A probe of any source raises until deaths are acknowledged.
        return dead

    def check_is_death(self, error: MPI.Exception, rank: int | None) -> None:
        """Return if `error` tells the death of a rank, which `search` reports.

        Raises `HorovodInternalError` for any other error.
        """
        self.occurred = True
        if error.Get_error_class() not in self._deaths:
            place = "" if rank is None else f" to rank {rank}"
            raise HorovodInternalError(f"MPI failed{place}: {error}", rank) from error

    def error_of(self, error: MPI.Exception, rank: int | None) -> HorovodInternalError:
        """Return the error of a wait for `rank`, which names the rank that has died.

        A rank that is alive can fail to answer because another one has died: the dead one is named.
        """
        if error.Get_error_class() == self._mpi.ERR_TRUNCATE:
            return ProtocolError(f"rank {rank} sent more than was expected", rank)
        self.check_is_death(error, rank)
        dead = self.dead()
        if rank is None or (dead and rank not in dead):
            rank = min(dead, default=self._rank)
        return connection_lost(rank)


# -- messages

BODY, GOODBYE = 1, 2  # Tags of messages. A goodbye closes the connection, as MPI shows no close.


class RemoteMessages:
    """The control messages of this rank to and from remote ranks."""

    def __init__(
        self, mpi: Any, comm: MPI.Intracomm, ranks: set[int], failures: RemoteFailures
    ) -> None:
        self._mpi, self._comm, self.ranks = mpi, comm, ranks
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
                if tag == BODY:
                    messages.append(Incoming(rank, bytes(body)))
                elif tag == GOODBYE and not body:
                    self._lost.add(rank)
                    messages.append(Incoming(rank, None))
                else:
                    raise ProtocolError(f"rank {rank} sent a foreign message, tag {tag}", rank)
        except mpi.Exception as error:
            self._failures.check_is_death(error, None)
            dead = self._failures.dead()
            self._receives = deque(r for r in self._receives if r[1] not in dead)
        for rank in self._failures.search(self.ranks - self._lost):
            self._lost.add(rank)
            messages.append(Incoming(rank, None))
        return messages

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
