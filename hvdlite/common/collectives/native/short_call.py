"""The binding to `short_call.h`: small data that ranks of a host exchange in the waiting threads.

A call is described once (`Given`) whatever its collective: who gives how much, whether ranks tell
numbers of rows, and whether the data are reduced or copied.

The memory of each rank is divided into a board (that of the host's first rank counts) and, for
every slot, two buffers: there are slots for small data, and fewer for larger data.
"""

from __future__ import annotations

import ctypes
import os
import threading
from array import array as numbers
from typing import Any, NamedTuple

import numpy as np

from hvdlite.common.collectives.base import Array, Members
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.collectives.native.collectives import MOST_RANKS
from hvdlite.common.collectives.native.library import Library
from hvdlite.common.collectives.native.segment import address, codes
from hvdlite.common.transport.base import SHORT_CALL_BYTES, Transport

BOARD_BYTES = 8 << 10
SMALL_SLOTS, SMALL_BYTES = 16, 4 << 10
LARGE_SLOTS, LARGE_BYTES = 1, 1 << 20
LARGE_SLOT_BYTES = LARGE_BYTES + 8 * MOST_RANKS  # numbers of rows stand in front of the data
# Of all members together. Beyond the first, more than two members reduce ranges for all; beyond the
# second, it is faster to go through the slots where every rank reads all.
DIVIDED_BYTES = 1 << 20
MOST_TO_READ_BYTES = 2 << 20
COPY = -1  # as an operation
TAG_BITS = 45
# How long a rank waits for the others before it turns to the coordinator: it then has lost the time
# of a negotiation, and can see again who is gone and that a job is over.
TIMEOUT_SECONDS = 0.01
# How long the end of a job waits for a thread in a call; a signal handler may keep one there.
RELEASE_SECONDS = 1.0
SPIN_SECONDS = 20e-6  # where every rank has a core, and one is left

_BUFFERS = SMALL_SLOTS * SMALL_BYTES + LARGE_SLOTS * LARGE_SLOT_BYTES
assert 2 * _BUFFERS + BOARD_BYTES == SHORT_CALL_BYTES

_Integer, _Pointer = ctypes.c_int64, ctypes.c_void_p


class ShortCall(ctypes.Structure):
    """A call at one rank: `ShortCall` of short_call.h."""

    _fields_ = (
        *((name, _Integer) for name in (
            "members", "index", "local_size", "slot", "tag", "data", "data_bytes", "type",
            "operation", "itemsize", "root", "counts", "row_bytes", "scattered", "divided",
            "helpers", "identity",
        )),
        ("prescale", ctypes.c_double),
        ("postscale", ctypes.c_double),
        *((name, _Pointer) for name in ("local", "memory", "rows")),
        ("tensors", _Integer),
        ("sizes", _Pointer),
        *((name, _Integer) for name in ("nbytes", "start", "taken")),
        *((name, _Pointer) for name in ("places", "input", "output")),
        *((name, _Integer) for name in (
            "timeout_ns", "spin_ns", "declines", "completed", "told", "began_ns", "parity",
        )),
    )  # fmt: skip


class Given(NamedTuple):
    """What members give in a call, the same on all of them, and what they do with it."""

    most_bytes: int  # that a member gives
    arithmetic: Arithmetic | None = None  # None: the data are copied
    root: int = -1  # the place of the only member that gives; -1: all do
    counts: int = 0  # numbers of rows that each member tells: 0, 1, or one for each member
    row_bytes: int = 0  # where they are told
    scattered: bool = False  # whether no two members take the same
    divided: bool = False  # whether ranges are reduced once for all


class ShortExchange:
    """The place of one rank among those of its host, which are at most `MOST_RANKS`."""

    def __init__(self, transport: Transport, library: Library) -> None:
        self._exchange: Any = library.code.hvdlite_short_call
        self._take: Any = library.code.hvdlite_take_short_call
        self._decline: Any = library.code.hvdlite_decline_short_call
        self._agree: Any = library.code.hvdlite_agree_on_short_call
        self._open: Any = library.code.hvdlite_open_short_calls
        for function in (self._exchange, self._take, self._decline, self._agree):
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
        # By the ranks of the members: what is the same in all calls, and what it points to.
        self._groups: dict[tuple[int, ...], tuple[ShortCall, Array]] = {}
        self._cores = len(os.sched_getaffinity(0))
        self._spin_ns = int(SPIN_SECONDS * 1e9) if self._cores > len(self._ranks) else 0
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
        known = self._groups.get(members.ranks)
        if known is None:
            known = self._groups[members.ranks] = self._group(members)
        call = ShortCall.from_buffer_copy(known[0])
        call.slot, call.tag = digest % SMALL_SLOTS, digest >> (64 - TAG_BITS)
        return call

    def _group(self, members: Members) -> tuple[ShortCall, Array]:
        local = np.array([self._ranks.index(rank) for rank in members.ranks], np.int64)
        call = ShortCall(
            members=members.size,
            index=members.index,
            local_size=len(self._ranks),
            operation=COPY,
            root=-1,
            helpers=min(members.size, self._cores) - 1,
            identity=self._identity,
            local=address(local),
            memory=address(self._memory),
            timeout_ns=int(TIMEOUT_SECONDS * 1e9),
            spin_ns=self._spin_ns,
            declines=-1,
        )
        return call, local

    def add_data(self, call: ShortCall, given: Given) -> None:
        """Let a call have data; of no member they are more than `LARGE_BYTES`."""
        call.data = BOARD_BYTES + 2 * call.slot * SMALL_BYTES
        call.data_bytes = SMALL_BYTES
        if given.counts or given.most_bytes > SMALL_BYTES:
            number = call.slot % LARGE_SLOTS
            call.slot = SMALL_SLOTS + number
            call.data = BOARD_BYTES + 2 * (SMALL_SLOTS * SMALL_BYTES + number * LARGE_SLOT_BYTES)
            call.data_bytes = LARGE_SLOT_BYTES
        call.root, call.counts, call.row_bytes = given.root, given.counts, given.row_bytes
        call.scattered, call.divided = given.scattered, given.divided
        if given.arithmetic is not None:
            found = codes(given.arithmetic)
            assert found is not None
            call.type, call.operation = found
            call.itemsize = given.arithmetic.input_dtype.itemsize
            call.prescale = given.arithmetic.reduction.prescale
            call.postscale = given.arithmetic.reduction.postscale

    def run(self, call: ShortCall) -> None:
        """Exchange with the others: `call.completed` says whether all came in time.

        The result is there then; where rows are told, `take` must follow.
        """
        self._exchange(ctypes.byref(call))

    def take(self, call: ShortCall) -> None:
        """Take the result of a call that is complete, into its output; none where there is none."""
        self._take(ctypes.byref(call))

    def decline(self, call: ShortCall) -> None:
        """Tell the others that this rank goes another way this time."""
        self._decline(ctypes.byref(call))

    def agree(self, call: ShortCall) -> None:
        """Count declines as the others do, when all of them have reported a call."""
        self._agree(ctypes.byref(call))


def set_places(call: ShortCall, sizes: numbers[int], places: numbers[int]) -> None:
    """Let a call reduce tensors of these sizes in bytes in place; both must live until it ends."""
    call.tensors = len(sizes)
    call.sizes, call.places = sizes.buffer_info()[0], places.buffer_info()[0]


def set_data(call: ShortCall, source: Array, target: Array) -> None:
    """Let a call read `source`, flat, and write `target`, which may be the same memory."""
    call.input = address(source)
    call.output = call.input if target is source else address(target)
