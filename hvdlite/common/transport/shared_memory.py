"""Memory that all ranks of a host see: a memfd of each rank, which its peers map, too."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.base.errors import HorovodInternalError, ProtocolError


class Memory:
    """The memfd of one rank and its mapping in this process. Views keep their mapping alive."""

    def __init__(self, rank: int, descriptor: int) -> None:
        self._rank = rank
        self._descriptor = descriptor
        self._mapping: mmap.mmap | None = None  # None until the first view.
        self._mapped: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def view(self, nbytes: int, *, grow: bool) -> NDArray[np.uint8]:
        """Return the first `nbytes` bytes; only the owner may `grow` the memory."""
        if self._mapped.size < nbytes:
            size = os.fstat(self._descriptor).st_size
            if size < nbytes:
                if not grow:
                    raise ProtocolError(
                        f"rank {self._rank} shares {size} bytes of memory, not {nbytes}", self._rank
                    )
                size = self._grow(nbytes)
            self._mapping = mmap.mmap(self._descriptor, size)
            self._mapped = np.frombuffer(self._mapping, np.uint8)
        return self._mapped[:nbytes]

    def _grow(self, nbytes: int) -> int:
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            # Without allocation, a full memory would raise SIGBUS at the first access.
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            raise HorovodInternalError(
                f"rank {self._rank} cannot have {size} bytes of shared memory: {error}"
            ) from error
        return size

    def close(self) -> None:
        """Close the descriptor, and unmap the memory, now or with the last view of it."""
        if self._descriptor < 0:  # Closed before: a forked child closes what its parent has closed.
            return
        os.close(self._descriptor)
        self._descriptor = -1
        self._mapped = np.zeros(0, np.uint8)
        if self._mapping is not None:
            with contextlib.suppress(BufferError):  # A view is in use, and keeps the mapping.
                self._mapping.close()
            self._mapping = None


def create_memory() -> int:
    """Create an empty memfd. Raises `OSError`."""
    return os.memfd_create("hvdlite", os.MFD_CLOEXEC)
