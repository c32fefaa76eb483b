"""The exchange of ranks that MPI has started. Blocking calls: `init` waits for all ranks anyway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI


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
