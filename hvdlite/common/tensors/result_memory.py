"""Memory of large results, which serves the next result when the user has freed one.

The C library gives large memory back to the kernel at once. So every page of the next result would
be a page fault that clears it: 64 MiB take 17 ms in pages of 4 KiB, and 4 ms in huge ones, where
the collective itself takes 7. Memory that is kept takes none of it.

Kept memory is lent to one result at a time, and comes back when the last view of the result has
died. The kernel may take its pages whenever it needs them (MADV_FREE), so that it costs no other
program memory. It is private: a forked child has its own copy, as of all memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

LEAST_BYTES = 4 << 20  # the C library keeps what is less, most of the time
_HUGE_PAGE_BYTES = 2 << 20
_MOST_UNUSED = 1.25  # a result may have memory of so many times its size


class ResultMemory:
    """Lends memory to large results, and keeps up to `limit_bytes` of what has come back."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        # The oldest first. Its methods are atomic: results die in any thread, and also within a
        # garbage collection that begins in one of the methods here, where a lock would hang.
        self._kept: deque[mmap.mmap] = deque()

    @property
    def kept_bytes(self) -> int:
        return sum(len(block) for block in self._kept.copy())

    def lend(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Return memory of `nbytes` bytes without values, page-aligned.

        None for a result that is small, or larger than the limit, and where there is no memory.
        """
        if not LEAST_BYTES <= nbytes <= self.limit_bytes:
            return None
        size = -(-nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        block = self._take(size) or self._map(size)
        if block is None:
            return None
        array: NDArray[np.uint8] = np.frombuffer(block, np.uint8, nbytes)
        weakref.finalize(array, self._give_back, block).atexit = False
        return array

    def keep(self, limit_bytes: int) -> None:
        """Keep so much from now on, in bytes; 0 gives all kept memory back to the kernel."""
        self.limit_bytes = limit_bytes
        self._trim()

    def release(self) -> None:
        """Give all kept memory back to the kernel."""
        self._kept.clear()

    def _take(self, size: int) -> mmap.mmap | None:
        """Remove the kept block that came back last, of those that fit."""
        for block in reversed(self._kept.copy()):
            if size <= len(block) <= size * _MOST_UNUSED:
                with contextlib.suppress(ValueError, IndexError):  # another thread was faster
                    self._kept.remove(block)
                    return block
        return None

    def _map(self, size: int) -> mmap.mmap | None:
        try:
            block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            self.release()
            return None
        with contextlib.suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
        return block

    def _give_back(self, block: mmap.mmap) -> None:
        if self.limit_bytes == 0:
            return
        with contextlib.suppress(OSError):  # a kernel without MADV_FREE
            block.madvise(mmap.MADV_FREE)
        self._kept.append(block)
        self._trim()

    def _trim(self) -> None:
        while self.kept_bytes > self.limit_bytes:
            with contextlib.suppress(IndexError):  # another thread was faster
                self._kept.popleft()


result_memory = ResultMemory(0)  # `init` sets the limit
# A child of this process is no rank. What the parent keeps would stay in its memory as well.
os.register_at_fork(after_in_child=result_memory.release)
