"""What a short call gives and takes, from the request of this rank and the table of collectives."""

from __future__ import annotations

import math
from array import array as numbers
from collections.abc import Sequence

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.lists import split_rows
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.base import Array, Members
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.collectives.native.segment import address, codes
from hvdlite.common.collectives.native.short_call import (
    DIVIDED_BYTES,
    LARGE_BYTES,
    MOST_TO_READ_BYTES,
    TAG_BITS,
    Given,
    ShortCall,
    set_data,
    set_places,
)
from hvdlite.common.collectives.table import SPECS, reduction_of
from hvdlite.common.requests.entries import Bundle, Entry
from hvdlite.common.requests.messages import Request, Response
from hvdlite.common.tensors.adapter import HOST_DEVICE, numpy_dtype

TAG_MASK = (1 << TAG_BITS) - 1
TAG_STEP = 0x9E3779B97F4B  # Odd, so that all numbers of a series have tags of their own.
MOST_FAILURES = 6  # that are counted: one call in 1 << 6 is tried then


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
        nbytes = self._told(entry) * self._row_bytes if call.counts else entry.size_bytes
        if nbytes > self._most_bytes or (not call.counts and nbytes != self._most_bytes):
            return False
        call.nbytes = nbytes
        entry.response = self._response
        if type(entry) is Bundle:
            set_places(call, entry.sizes, entry.places)
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

    def _told(self, entry: Entry) -> int:
        """Tell how many rows this rank gives, or gives to each member; return their sum."""
        rows = entry.splits if self._spec.splits else entry.request.shape[:1]
        for place, count in enumerate(rows):
            self._rows[place] = count
        if self._spec.splits:
            self._set_range(rows, self._row_bytes)
        return sum(rows)

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
