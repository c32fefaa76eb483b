"""The exchange: the one operation by which ranks that know nothing of each other meet.

Everything that a job agrees on before its ranks are connected (versions, hosts, addresses) is an
allgather of bytes. Each way to start a job brings an exchange of its own; the transport is built
upon whichever there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI


class Exchange(Protocol):
    """The meeting of the ranks of one job, as one rank sees it."""

    rank: int
    size: int

    def allgather(self, body: bytes) -> list[bytes]:
        """Return the `body` of every rank in rank order; blocks until all ranks have called it.

        The bodies may differ in length. Raises `HorovodInternalError` naming the ranks that did
        not come within the limit that the exchange was made with.
        """

    def close(self) -> None:
        """Leave the meeting. All ranks have received what they waited for."""


class Interrupt(Protocol):
    """Ends waits of a meeting that are no allgather, such as those for connections."""

    def fileno(self) -> int:
        """Return a descriptor that can be read when `raise_if_over` raises."""

    def raise_if_over(self) -> None:
        """Raise `HorovodInternalError` if the meeting is over, as one of its ranks is lost."""


class MpiExchange:
    """See `Exchange`: the ranks of `comm`, which stays open when the exchange is closed."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self.rank: int = comm.rank
        self.size: int = comm.size
        self._comm = comm
        self._byte = MPI.BYTE

    def allgather(self, body: bytes) -> list[bytes]:
        """See `Exchange.allgather`. Waits without a limit of its own."""
        lengths = np.empty(self.size, np.int64)
        self._comm.Allgather(np.array([len(body)], np.int64), lengths)
        ends = np.cumsum(lengths)
        buffer: Any = np.empty(int(ends[-1]), np.uint8)
        counts = (lengths.tolist(), (ends - lengths).tolist())
        self._comm.Allgatherv(np.frombuffer(body, np.uint8), [buffer, counts, self._byte])
        return [part.tobytes() for part in np.split(buffer, ends[:-1])]

    def close(self) -> None:
        """See `Exchange.close`."""
