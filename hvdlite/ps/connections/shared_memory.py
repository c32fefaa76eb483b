"""Memory of one process that processes of the same host map: a memfd, handed over once.

`SharedMemory` is the owner's side: it gives out arrays, and takes their memory back when the last
view of an array is gone. A `Window` is the other side, which only reads.

[Note: shared payloads] A payload that lies in the sender's shared memory is not sent: the message
says where it lies, and the receiver looks at it through its window. The sender keeps the array, and
so its memory, until the receiver has told that no view of it is left there; every message tells
what is held. After the end of their connection, that is when the receiver has closed the pipe that
belongs to the window, as the end of a process does. Nothing is overwritten while it is read, then,
whichever of both is slow, and what one of them has of a peer that was killed stays as it was.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np

from hvdlite.common.base.errors import ProtocolError
from hvdlite.ps.layouts.blocks import Array

SHARED_BYTES = 1 << 16  # Payloads from this size on are worth a place in shared memory.
STEPS = 8  # Sizes of regions between two powers of two: at most an eighth is not used.
Place = tuple[int, int]  # Where a payload begins in shared memory, and its bytes.


class SharedMemory:
    """Memory that peers may map. Its methods may be called from any thread."""

    def __init__(self) -> None:
        """Raise OSError where the system has no memfd that can be sealed."""
        self.descriptor = os.memfd_create("hvdlite-ps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # A peer that maps the memory must never find less of it than it was told of.
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._lock = threading.Lock()
        self._size = 0
        self._mappings: list[tuple[int, int, int]] = []  # Address, offset, bytes.
        self._memory: list[mmap.mmap] = []
        self._free: dict[int, list[memoryview]] = {}  # By their size.
        # Regions without views, which may be appended while any other code runs.
        self._returned: deque[memoryview] = deque()

    def new(self, size: int, dtype: np.dtype[Any]) -> Array:
        """Return an array that is not initialized; one that is not shared if memory is short."""
        nbytes = size * dtype.itemsize
        if nbytes < SHARED_BYTES:
            return np.empty(size, dtype)
        try:
            with self._lock:
                region = self._region(_rounded(nbytes))
        except OSError:
            return np.empty(size, dtype)
        root = np.frombuffer(region, np.uint8)
        weakref.finalize(root, self._returned.append, region).atexit = False
        return root[:nbytes].view(dtype)

    def copy(self, array: Array) -> Array:
        copied = self.new(array.size, array.dtype)
        np.copyto(copied, array)
        return copied

    def find(self, payload: memoryview) -> Place | None:
        """Return where a payload lies; None: somewhere else."""
        address = np.frombuffer(payload, np.uint8).__array_interface__["data"][0]
        for start, offset, size in self._mappings:
            if start <= address < start + size:
                return offset + address - start, payload.nbytes
        return None

    @property
    def nbytes(self) -> int:
        return self._size

    def close(self) -> None:
        """Close the descriptor; arrays keep their memory."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _region(self, nbytes: int) -> memoryview:
        while self._returned:
            region = self._returned.popleft()
            self._free.setdefault(region.nbytes, []).append(region)
        if free := self._free.get(nbytes):
            return free.pop()
        os.posix_fallocate(self.descriptor, self._size, nbytes)
        memory = mmap.mmap(self.descriptor, nbytes, offset=self._size)
        address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        self._mappings.append((address, self._size, nbytes))
        self._memory.append(memory)
        self._size += nbytes
        return memoryview(memory)


def _rounded(nbytes: int) -> int:
    """Return the size of a region: regions of few sizes can be used again for much."""
    step = max(mmap.ALLOCATIONGRANULARITY, 1 << max(0, nbytes.bit_length() - STEPS.bit_length()))
    return -(-nbytes // step) * step


class Descriptor:
    """A descriptor that is closed with the last reference to it."""

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, os.close, number).atexit = False


class _Mapped(mmap.mmap):
    """Memory of a peer. Views of it keep its window's pipe."""

    pipe: Descriptor


class Window:
    """The memory of a peer, to be read, and its pipe. Another thread may close it meanwhile."""

    def __init__(self, memory: Descriptor, pipe: Descriptor) -> None:
        """Raise ProtocolError where the memory could vanish."""
        self._open: tuple[Descriptor, Descriptor] | None = (memory, pipe)
        self._memory = memoryview(b"")
        try:
            sealed = fcntl.fcntl(memory.number, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:
            sealed = 0
        if not sealed:
            raise ProtocolError("a process shares memory that could shrink while it is read")

    def view(self, place: Place) -> memoryview:
        """Return what lies at a place; raise ProtocolError where nothing does."""
        offset, nbytes = place
        memory = self._memory
        if offset + nbytes > memory.nbytes:
            self._memory = memory = self._mapped(offset + nbytes)
        return memory[offset : offset + nbytes]

    def _mapped(self, nbytes: int) -> memoryview:
        if (descriptors := self._open) is None:
            raise ProtocolError("the process whose memory a message names has gone")
        memory, pipe = descriptors
        size = os.fstat(memory.number).st_size
        if nbytes > size:
            raise ProtocolError(f"a process shares {size} bytes, not {nbytes}")
        mapped = _Mapped(memory.number, size, prot=mmap.PROT_READ)
        mapped.pipe = pipe
        return memoryview(mapped)

    def close(self) -> None:
        """Map no more; views keep the memory."""
        self._open, self._memory = None, memoryview(b"")
