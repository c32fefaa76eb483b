"""The failures of remote ranks, as far as MPI reports them.

An MPI with user-level failure mitigation (ULFM: Bland, Bouteiller, Herault, Bosilca and Dongarra,
"Post-failure recovery of MPI communication capability", 2013) survives the death of a rank: calls
that need the rank raise an error, and the others can ask which ranks have died. With any other MPI
the launcher notices the death, and ends the job.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hvdlite.common.base.errors import HorovodInternalError, ProtocolError
from hvdlite.common.transport.base import CHECK_SECONDS, connection_lost

if TYPE_CHECKING:
    from mpi4py import MPI

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
        self._detects = self._can_detect()
        self._deaths = {getattr(mpi, name, -1) for name in _DEATHS}

    def _can_detect(self) -> bool:
        """Return whether this MPI tells which ranks have died."""
        try:
            self._comm.Get_failed().Free()
        except (self._mpi.Exception, NotImplementedError):
            return False
        return True

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
