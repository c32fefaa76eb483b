"""Memory of one process that processes of the same host map: a memfd, handed over once.

`SharedMemory` is the owner's side: it gives out arrays, and takes their memory back when the last
view of an array is gone. A `Window` is the other side, which only reads. `Sharing` has both sides
of a connection, whose two ends `swap` their memory.

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
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.connections.loop import READ, Loop
from hvdlite.common.connections.strangers import Stranger, check_credentials
from hvdlite.ps.connections.messages import Buffer, Message
from hvdlite.ps.layouts.blocks import Array

SHARED_BYTES = 1 << 16  # Payloads from this size on are worth a place in shared memory.
STEPS = 8  # Sizes of regions between two powers of two: at most an eighth is not used.
NOTE = "memory"  # The word in the body of a message that says where its payloads lie.
MAGIC = b"hvdlips3"
SWAP_SECONDS = 60.0  # The other end may be busy.
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
                region = self._region(nbytes)
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
        # Regions of few sizes can be used again for much.
        step = 1 << max(0, nbytes.bit_length() - STEPS.bit_length())
        step = max(mmap.ALLOCATIONGRANULARITY, step)
        nbytes = -(-nbytes // step) * step
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


# What two processes of one host know of each other's memory; see [Note: shared payloads].


class Sharing:
    """Both directions of one connection between this process and a peer."""

    def __init__(self, own: SharedMemory, theirs: Window) -> None:
        self._own, self._theirs = own, theirs
        self._sent = 0  # How many messages with places were sent.
        self._lent: dict[int, list[Buffer]] = {}  # By the number of their message.
        self._seen = 0  # The highest number of a message with places that has come.
        self._held: dict[int, int] = {}  # The number of such a message -> its views that are left.
        self._released: deque[int] = deque()  # May be appended to while any other code runs.

    def pack(self, message: Message) -> Message:
        """Return the message as it is sent: payloads that lie in shared memory are places."""
        places: list[Place | None] = []
        frames: list[Buffer] = []
        lent: list[Buffer] = []
        for payload in message.payloads:
            place = None
            if isinstance(payload, memoryview) and payload.nbytes >= SHARED_BYTES:
                place = self._own.find(payload)
            places.append(place)
            (frames if place is None else lent).append(payload)
        if not lent and not self._seen:
            return message
        number = 0
        if lent:
            self._sent = number = self._sent + 1
            self._lent[number] = lent
        while self._released:
            released = self._released.popleft()
            self._held[released] -= 1
            if not self._held[released]:
                del self._held[released]
        note = [number, self._seen, list(self._held), places]
        return message._replace(body={**message.body, NOTE: note}, payloads=frames)

    def unpack(self, message: Message) -> Message:
        """Return the message with its payloads. Raises ProtocolError for places that are none."""
        if NOTE not in message.body:
            return message
        body = dict(message.body)
        try:
            number, seen, held, places = body.pop(NOTE)
            for old in [each for each in self._lent if each <= seen and each not in held]:
                del self._lent[old]
            frames = iter(message.payloads)
            payloads: list[Any] = [
                next(frames) if place is None else self._look(number, place) for place in places
            ]
        except (TypeError, ValueError, StopIteration) as error:
            raise ProtocolError(f"a message says wrongly where its payloads lie: {error}") from None
        if number:
            self._seen = max(self._seen, number)
        return message._replace(body=body, payloads=tuple(payloads))

    @property
    def lent(self) -> int:
        """The number of messages whose payloads the peer may still look at."""
        return len(self._lent)

    def close(self) -> None:
        """Say no more to the peer, which may still look at what was lent to it."""
        self._theirs.close()

    def let_go(self) -> None:
        """Take note that the peer looks at nothing any more."""
        self._lent = {}  # Another one, as another thread may go through the old one.

    def _look(self, number: int, place: Place) -> memoryview:
        root = np.frombuffer(self._theirs.view(place), np.uint8)
        self._held[number] = self._held.get(number, 0) + 1
        weakref.finalize(root, self._released.append, number).atexit = False
        return root.data


# How the two ends of a Unix socket hand each other their memory, when both have proved themselves.
#
# Each end sends a few bytes with two descriptors, and takes those of the other end; what follows
# are messages. One is that of its memory. The other is the end of a pipe, which the other end keeps
# as long as it looks at that memory: when it is closed there, by whatever end of that process, what
# was lent is free again. Both ends are on the same host, and processes of the same user.


def is_here(name: str) -> bool:
    """Return whether the process with this name is on this host, and of this user."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            if connection.connect_ex(f"\0{name}") != 0:
                return False
            check_credentials(connection)  # Else it would refuse this process, and TCP goes.
            return True
    except (OSError, ProtocolError):  # An OSError without a free descriptor.
        return False


def swap(
    loop: Loop, connection: socket.socket, memory: SharedMemory,
    done: Callable[[Sharing], None], failed: Callable[[str], None] = lambda why: None,
) -> Callable[[], None]:  # fmt: skip
    """Hand over the own memory for that of the other end; where that fails, close.

    What is returned gives it up.
    """
    stranger = Stranger(
        loop, connection, lambda error: failed(f"its memory does not come: {error}")
    )

    def take(_events: int) -> None:
        try:
            window = _receive(connection)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            stranger.fail(error)
            return
        stranger.release()
        done(_shared(loop, memory, window, loan))

    try:
        check_credentials(connection)
        loan, held = map(Descriptor, os.pipe())
        socket.send_fds(connection, [MAGIC], [memory.descriptor, held.number])
    except (OSError, ProtocolError) as error:
        stranger.fail(error)
    else:
        loop.watch(connection.fileno(), READ, take)
        loop.call_after(SWAP_SECONDS, lambda: stranger.fail(TimeoutError("it is silent")))
    return stranger.close


def _shared(loop: Loop, memory: SharedMemory, window: Window, loan: Descriptor) -> Sharing:
    """Return what both ends share; what was lent is let go when the other end's pipe is closed."""
    sharing = Sharing(memory, window)

    def end(_events: int) -> None:
        loop.forget(loan.number)
        sharing.let_go()

    loop.watch(loan.number, READ, end)
    return sharing


def _receive(connection: socket.socket) -> Window:
    data, numbers, *_ = socket.recv_fds(connection, len(MAGIC), 2)
    for number in numbers:
        os.set_inheritable(number, False)
    descriptors = [*map(Descriptor, numbers)]
    if data != MAGIC or len(descriptors) != 2:
        raise ProtocolError(f"it says {data!r} with {len(descriptors)} descriptors")
    return Window(*descriptors)
