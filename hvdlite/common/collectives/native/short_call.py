"""The binding to `short_call.h`: small data that ranks of a host exchange in the waiting threads.

The memory of each rank is divided into a board (that of the host's first rank counts) and, for
every slot, two buffers: there are slots for small data, and fewer for larger data.
"""

from __future__ import annotations

import ctypes
import os
import threading
from array import array as numbers
from typing import Any

import numpy as np

from hvdlite.common.collectives.base import Array, Members
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.collectives.native.segment import address, codes
from hvdlite.common.collectives.native.shm import Library
from hvdlite.common.transport.base import SHORT_CALL_BYTES, Transport

BOARD_BYTES = 8 << 10
SMALL_SLOTS, SMALL_BYTES = 16, 4 << 10
LARGE_SLOTS, LARGE_BYTES = 1, 1 << 20
# Every rank adds all data of all members. Beyond this it is faster to divide the work.
MOST_TO_ADD_BYTES = 2 << 20
TAG_BITS = 45
# How long a rank waits for the others before it turns to the coordinator: it then has lost the time
# of a negotiation, and can see again who is gone and that a job is over.
TIMEOUT_SECONDS = 0.01
# How long the end of a job waits for a thread in a call; a signal handler may keep one there.
RELEASE_SECONDS = 1.0
SPIN_SECONDS = 20e-6  # where every rank has a core, and one is left

assert 2 * (SMALL_SLOTS * SMALL_BYTES + LARGE_SLOTS * LARGE_BYTES) + BOARD_BYTES == SHORT_CALL_BYTES

_Integer, _Pointer = ctypes.c_int64, ctypes.c_void_p


class ShortCall(ctypes.Structure):
    """A call at one rank: `ShortCall` of short_call.h."""

    _fields_ = (
        *((name, _Integer) for name in (
            "members", "index", "local_size", "slot", "tag", "data", "data_bytes", "type",
            "operation", "itemsize", "nbytes", "identity", "root",
        )),
        ("prescale", ctypes.c_double),
        ("postscale", ctypes.c_double),
        *((name, _Pointer) for name in ("local", "memory")),
        ("tensors", _Integer),
        *((name, _Pointer) for name in ("sizes", "places", "input", "output")),
        *((name, _Integer) for name in (
            "timeout_ns", "spin_ns", "declines", "completed", "told", "began_ns",
        )),
    )  # fmt: skip


class ShortExchange:
    """The place of one rank among those of its host, which are at most `MOST_RANKS`."""

    def __init__(self, transport: Transport, library: Library) -> None:
        self._exchange: Any = library.code.hvdlite_short_call
        self._decline: Any = library.code.hvdlite_decline_short_call
        self._open: Any = library.code.hvdlite_open_short_calls
        for function in (self._exchange, self._decline):
            function.restype = None
            function.argtypes = (ctypes.POINTER(ShortCall),)
        self._open.restype = None
        self._open.argtypes = (_Pointer, _Integer, _Integer, _Integer)
        # The tags and counters of a version are of no use to another.
        self._identity = library.identity >> 1 | 1
        self._ranks = transport.topology.peers(transport.rank)
        self._views = [transport.short_call_memory(rank) for rank in self._ranks]
        self._memory = np.array([address(view) for view in self._views], np.uint64)
        self._own = self._ranks.index(transport.rank)
        self._locals: dict[tuple[int, ...], Array] = {}
        cores = len(os.sched_getaffinity(0))
        self._spin_ns = int(SPIN_SECONDS * 1e9) if cores > len(self._ranks) else 0
        # One thread of this rank at a time: it alone writes the buffers of the slot.
        self.locks = [threading.Lock() for _ in range(SMALL_SLOTS + LARGE_SLOTS)]

    def open(self, comes: bool) -> None:
        """Tell the others whether this rank takes part in short calls from now on."""
        identity = self._identity if comes else 0
        self._open(int(self._memory[0]), self._own, identity, len(self.locks))

    def release(self) -> None:
        """Unmap the memory once no thread is in a call, and let none begin another one."""
        held = [lock.acquire(timeout=RELEASE_SECONDS) for lock in self.locks]
        if all(held):
            self._views = []

    def among(self, members: Members) -> bool:
        """Return whether all members are ranks of this host."""
        return set(members.ranks) <= set(self._ranks)

    def prepare(self, members: Members, digest: int) -> ShortCall:
        """Return a call without data; all members give the same `digest` of it."""
        local = self._locals.get(members.ranks)
        if local is None:
            local = np.array([self._ranks.index(rank) for rank in members.ranks], np.int64)
            self._locals[members.ranks] = local
        return ShortCall(
            members=members.size,
            index=members.index,
            local_size=len(self._ranks),
            slot=digest % SMALL_SLOTS,
            tag=digest >> (64 - TAG_BITS),
            identity=self._identity,
            root=-1,
            local=address(local),
            memory=address(self._memory),
            timeout_ns=int(TIMEOUT_SECONDS * 1e9),
            spin_ns=self._spin_ns,
        )

    def add_data(self, call: ShortCall, arithmetic: Arithmetic, nbytes: int) -> None:
        """Let a call reduce `nbytes` of data, at most `LARGE_BYTES`."""
        self.carry_data(call, nbytes)
        found = codes(arithmetic)
        assert found is not None
        call.type, call.operation = found
        call.itemsize = arithmetic.input_dtype.itemsize
        call.prescale = arithmetic.reduction.prescale
        call.postscale = arithmetic.reduction.postscale

    def carry_data(self, call: ShortCall, nbytes: int, root: int = -1) -> None:
        """Let a call have `nbytes` of data, at most `LARGE_BYTES`; all get those of a `root`."""
        call.root, call.nbytes = root, nbytes
        call.data = BOARD_BYTES + 2 * call.slot * SMALL_BYTES
        call.data_bytes = SMALL_BYTES
        if nbytes > SMALL_BYTES:
            number = call.slot % LARGE_SLOTS
            call.slot = SMALL_SLOTS + number
            call.data = BOARD_BYTES + 2 * (SMALL_SLOTS * SMALL_BYTES + number * LARGE_BYTES)
            call.data_bytes = LARGE_BYTES

    def message(self, like: ShortCall, digest: int, nbytes: int) -> ShortCall:
        """Return a call for another message of `nbytes` between the same two ranks."""
        call = ShortCall.from_buffer_copy(like)
        call.slot, call.tag = digest % SMALL_SLOTS, digest >> (64 - TAG_BITS)
        self.carry_data(call, nbytes, call.root)
        return call

    def run(self, call: ShortCall) -> None:
        """Exchange with the others: `call.completed` says whether all came in time."""
        self._exchange(ctypes.byref(call))

    def decline(self, call: ShortCall) -> None:
        """Tell the others that this rank goes another way this time."""
        self._decline(ctypes.byref(call))


def set_places(call: ShortCall, sizes: numbers[int], places: numbers[int]) -> None:
    """Let a call reduce tensors of these sizes in bytes in place; both must live until it ends."""
    call.tensors = len(sizes)
    call.sizes, call.places = sizes.buffer_info()[0], places.buffer_info()[0]


def set_data(call: ShortCall, source: Array, target: Array) -> None:
    """Let a call read `source`, flat, and write `target`, which may be the same memory."""
    call.input = address(source)
    call.output = call.input if target is source else address(target)
