"""Short calls: small data that ranks of a host exchange in the waiting threads (`short_call.h`).

What a call gives and takes follows from the request of this rank and the table of collectives. It
is described once (`Given`) whatever its collective: who gives how much, whether ranks tell
numbers of rows, and whether the data are reduced or copied.

The memory of each rank is divided into a board (that of the host's first rank counts) and, for
every slot, two buffers: there are slots for small data, and fewer for larger data.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from array import array as numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.lists import split_rows
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.base import Array, Members
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.collectives.native.collectives import MOST_RANKS
from hvdlite.common.collectives.native.library import Library
from hvdlite.common.collectives.native.segment import address, codes, set_reduction
from hvdlite.common.collectives.table import SPECS, reduction_of
from hvdlite.common.requests.entries import Bundle, Entry
from hvdlite.common.requests.messages import Request, Response
from hvdlite.common.tensors.adapter import HOST_DEVICE, numpy_dtype
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
TAG_MASK = (1 << TAG_BITS) - 1
TAG_STEP = 0x9E3779B97F4B  # Odd, so that all numbers of a series have tags of their own.
MOST_FAILURES = 6  # that are counted: one call in 1 << 6 is tried then
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
        # Exchanges with the others: `call.completed` says whether all came in time. The result is
        # there then; where rows are told, `take` must follow.
        self.run: Any = library.code.hvdlite_short_call
        # Takes the result of a call that is complete into its output; none where there is none.
        self.take: Any = library.code.hvdlite_take_short_call
        # Tells the others that this rank goes another way this time.
        self.decline: Any = library.code.hvdlite_decline_short_call
        # Counts declines as the others do, when all of them have reported a call.
        self.agree: Any = library.code.hvdlite_agree_on_short_call
        self._open: Any = library.code.hvdlite_open_short_calls
        for function in (self.run, self.take, self.decline, self.agree):
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
            local = np.array([self._ranks.index(rank) for rank in members.ranks], np.int64)
            group = ShortCall(
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
                spin_ns=int(SPIN_SECONDS * 1e9) if self._cores > len(self._ranks) else 0,
                declines=-1,
            )
            known = self._groups[members.ranks] = group, local
        call = ShortCall.from_buffer_copy(known[0])
        call.slot, call.tag = digest % SMALL_SLOTS, digest >> (64 - TAG_BITS)
        return call

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
            set_reduction(call, given.arithmetic)


def set_data(call: ShortCall, source: Array, target: Array) -> None:
    """Let a call read `source`, flat, and write `target`, which may be the same memory."""
    call.input = address(source)
    call.output = call.input if target is source else address(target)


class Record:
    """How calls have gone that come again: those under one name, or all messages of a pair."""

    def __init__(self) -> None:
        self.failures = 0  # one after the other, of the latest calls that this rank has tried

    def skip(self, number: int) -> bool:
        """Return whether to skip a call, by a number that all members have alike.

        Ranks fail alone where others do not try, so they count different failures: what a rank
        tries is tried by all that have failed less often.
        """
        return self.failures > 1 and number % (1 << self.failures) != 0

    def note(self, *, completed: bool) -> None:
        """Record how a call went: after several in vain, most are skipped."""
        self.failures = 0 if completed else min(self.failures + 1, MOST_FAILURES)


class ShortCallData:
    """A call that this rank has made as a short one, and may make again."""

    def __init__(
        self, request: Request, members: Members, call: ShortCall, given: Given, record: Record
    ) -> None:
        self.request = request  # the latest
        self.meaning = meaning_of(request)
        self.members = members
        self.call = call
        self._first_tag: int = call.tag
        self.record = record
        self.failure: HorovodInternalError | None = None  # why this rank has not the latest result
        self._spec = SPECS[request.collective]
        self._most_bytes = given.most_bytes
        self._row_bytes = given.row_bytes
        self._response = Response(request)
        self._rows = numbers("q", [0] * members.size)
        call.rows = self._rows.buffer_info()[0]
        if given.scattered and not given.counts:
            parts = split_rows(request.shape[0], members.size)
            self._set_range(parts, given.most_bytes // request.shape[0])
        elif not given.counts:
            call.taken = given.most_bytes

    def is_for(self, request: Request, ranks: tuple[int, ...] | None) -> bool:
        """Return whether a request means this call among these ranks; it is the latest then."""
        if self.members.ranks != ranks:
            return False
        if self.request is not request:
            if meaning_of(request) != self.meaning:
                return False
            self.request, self._response = request, Response(request)
        return True

    def number(self, number: int) -> None:
        """Be the call of a series with this number, which comes once."""
        self.call.tag = (self._first_tag + number * TAG_STEP) & TAG_MASK
        self.call.declines = -1

    def numbered(self, number: int) -> ShortCall:
        """Return a call of a series; another thread may be in this one."""
        call = ShortCall.from_buffer_copy(self.call)
        call.tag = (self._first_tag + number * TAG_STEP) & TAG_MASK
        call.declines = -1
        return call

    def skip(self, entry: Entry) -> bool:
        """Return whether to skip this call; all messages of a pair have one record."""
        if self.record.failures <= 1:  # Nearly always so, and the number takes a while to read.
            return False
        if entry.series is not None:
            return self.record.skip(entry.number)
        return self.record.skip(self.call.tag + max(self.call.declines, 0))

    def give(self, entry: Entry) -> bool:
        """Set what this rank gives, and takes if its size is known; False if it is too much."""
        call = self.call
        nbytes = entry.size_bytes
        if call.counts:  # This rank tells how many rows it gives, or gives to each member.
            rows = entry.splits if self._spec.splits else entry.request.shape[:1]
            for place, count in enumerate(rows):
                self._rows[place] = count
            if self._spec.splits:
                self._set_range(rows, self._row_bytes)
            nbytes = sum(rows) * self._row_bytes
        if nbytes > self._most_bytes or (not call.counts and nbytes != self._most_bytes):
            return False
        call.nbytes = nbytes
        entry.response = self._response
        if type(entry) is Bundle:
            # The tensors are reduced in place; the entry keeps these numbers until the call ends.
            call.tensors = len(entry.sizes)
            call.sizes, call.places = entry.sizes.buffer_info()[0], entry.places.buffer_info()[0]
        elif call.counts:
            call.input = address(entry.input)
        elif entry.address is not None:
            call.input = call.output = entry.address
        elif entry.request.parties and call.root == call.index:
            set_data(call, entry.input, entry.input)
        elif self._most_bytes:
            shape = self._spec.result_shape(self.request, self.members, ())
            set_data(call, entry.input, entry.output(shape))
        return True

    def _set_range(self, rows: Sequence[int], row_bytes: int) -> None:
        """Set the range of what this rank gives that it takes itself, by the rows for each."""
        index = self.members.index
        self.call.start, self.call.taken = sum(rows[:index]) * row_bytes, rows[index] * row_bytes

    def make_room(self, entry: Entry) -> Array:
        """Let the call write the result of an entry, whose size the members have told, to this."""
        rows = tuple(self._rows)
        if self._spec.splits:
            entry.received_splits = rows
        else:
            if self._response.first_dims != rows:
                self._response = Response(self.request, rows)
            entry.response = self._response
        shape = self._spec.result_shape(self.request, self.members, rows)
        output = entry.output(shape)
        self.call.output = address(output)
        return output


def meaning_of(request: Request) -> Request:
    """Return the part of a request that all members must have alike, to meet."""
    if SPECS[request.collective].varying_rows and request.shape:
        return request._replace(shape=(0, *request.shape[1:]))
    return request


def given(request: Request, members: Members) -> Given | None:
    """Return what members give in a call with data; None for what cannot be a short one."""
    spec, shape = SPECS[request.collective], request.shape
    rootless = spec.rooted and request.root_rank not in members.ranks
    if request.device != HOST_DEVICE or rootless or not (shape or spec.scalars):
        return None
    dtype = numpy_dtype(request.dtype)
    scattered = spec.scatters or spec.splits
    most = LARGE_BYTES
    if not (scattered or spec.rooted or spec.reduces):
        most = min(most, MOST_TO_READ_BYTES // members.size)
    if spec.varying_rows:
        counts = members.size if spec.splits else 1
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        return Given(most, counts=counts, row_bytes=row_bytes, scattered=scattered)
    nbytes = math.prod(shape) * dtype.itemsize
    if not 0 < nbytes <= most:
        return None
    if not spec.reduces:
        is_known = request.root_rank in members.ranks
        return Given(nbytes, root=members.ranks.index(request.root_rank)) if is_known else None
    reduction = reduction_of(request, members.size)
    # Adasum has no arithmetic, and a backend of its own.
    if reduction.reduce_op is ReduceOp.ADASUM or codes(Arithmetic(dtype, reduction)) is None:
        return None
    divided = not scattered and members.size > 2 and nbytes * members.size > DIVIDED_BYTES
    return Given(nbytes, Arithmetic(dtype, reduction), scattered=scattered, divided=divided)
