"""Memory that all ranks of a host see: a memfd of each rank, which its peers map, too.

It begins with SHORT_CALL_BYTES for short calls, which are there from the start; what follows grows.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.base.errors import HorovodInternalError, ProtocolError
from hvdlite.common.transport.base import SHORT_CALL_BYTES


class Memory:
    """The memfd of one rank and its mapping in this process. Views keep their mapping alive."""

    def __init__(self, rank: int, descriptor: int) -> None:
        self._rank = rank
        self._descriptor = descriptor
        self._mapping: mmap.mmap | None = None  # None until the first view.
        self._mapped: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def view(self, nbytes: int, *, grow: bool) -> NDArray[np.uint8]:
        """Return `nbytes` bytes behind the head; only the owner may `grow` the memory."""
        nbytes += SHORT_CALL_BYTES
        if self._mapped.size < nbytes:
            size = os.fstat(self._descriptor).st_size
            if size < nbytes:
                if not grow:
                    raise ProtocolError(
                        f"rank {self._rank} shares {size} bytes of memory, not {nbytes}", self._rank
                    )
                size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
                _allocate(self._descriptor, size, f"rank {self._rank}")
            self._mapping = mmap.mmap(self._descriptor, size)
            self._mapped = np.frombuffer(self._mapping, np.uint8)
        return self._mapped[SHORT_CALL_BYTES:nbytes]

    def head(self) -> NDArray[np.uint8]:
        """Return the bytes for short calls, in a mapping of their own."""
        mapping = mmap.mmap(self._descriptor, SHORT_CALL_BYTES)
        return np.frombuffer(mapping, np.uint8)

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
    """Create a memfd with a head of zeros. Raises `OSError`, `HorovodInternalError`."""
    descriptor = os.memfd_create("hvdlite", os.MFD_CLOEXEC)
    try:
        _allocate(descriptor, SHORT_CALL_BYTES, "this process")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _allocate(descriptor: int, size: int, owner: str) -> None:
    """Give a file `size` bytes: a full memory would else raise SIGBUS at the first access."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        raise HorovodInternalError(
            f"{owner} cannot have {size} bytes of shared memory: {error}"
        ) from error
