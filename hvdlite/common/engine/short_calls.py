"""Short calls: a thread that waits for a small collective exchanges it with the ranks of its host.

[Note: short calls]
A blocking call of a few bytes costs wake-ups: of the engine, of the coordinator, of the engine
again, and of the thread that waits. Where all members are ranks of one host and wait for the same
call, none of that is needed: each thread writes its data into shared memory, and the last one wakes
the others (short_call.h). The coordinator is asked only when that fails.

It is right for these reasons.

* All or none: who withdraws and who completes a round is decided by one word, so that a call is
  either exchanged by all members, or reported to the coordinator by all of them.
* Nothing waits for a short call but the thread that made it, for `TIMEOUT_SECONDS` at most. The
  engines go on meanwhile, so the one total order of the others is not touched.
* Ranks meet by a digest of the whole request: a disagreement is a call for which nobody else comes,
  and the coordinator tells what is wrong. So it is with a stall, a lost rank, a join, a departure:
  whatever is not a plain call of all members takes the way through the coordinator.
* The sum is that of the data plane: the order of the members, by the same code.

A rank that takes the other way says so (`decline`), so that the rest does not wait in vain.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgpack

from hvdlite.common.collectives.base import Members
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.collectives.native.segment import codes
from hvdlite.common.collectives.native.short_call import (
    LARGE_BYTES,
    MOST_TO_ADD_BYTES,
    ShortCall,
    ShortExchange,
    set_data,
    set_places,
)
from hvdlite.common.collectives.shm import ShmBackend
from hvdlite.common.collectives.table import SPECS, reduction_of
from hvdlite.common.engine.executor import Executor
from hvdlite.common.engine.pending import PendingTable
from hvdlite.common.plain.adapter import HOST_DEVICE, numpy_dtype
from hvdlite.common.plain.entries import Bundle, Entry, SegmentRun
from hvdlite.common.plain.messages import Request, Response
from hvdlite.common.plain.process_set_table import ProcessSetTable

MOST_PREPARED = 500  # calls; those without a name never come again
MOST_SKIPPED = 64  # calls, after several that nobody else came to


class _Record:
    """How calls have gone that come again: those under one name, or all messages of a pair."""

    def __init__(self) -> None:
        self.failures = 0  # one after the other, of the latest calls
        self.skips = 0  # of the next calls take the other way at once

    def skip(self) -> bool:
        """Return whether to skip a call, which is counted then."""
        if self.skips:
            self.skips -= 1
            return True
        return False

    def note(self, *, completed: bool) -> None:
        """Record how a call went: after several in vain, the next ones are skipped."""
        self.failures = 0 if completed else self.failures + 1
        self.skips = 0 if completed else min(1 << self.failures, MOST_SKIPPED) - 2


class _Pair(NamedTuple):
    """A sender and a receiver of messages that memory serves."""

    members: Members
    call: ShortCall  # What their calls have alike.
    record: _Record


class _Prepared:
    """A request that this rank has made as a short call, and may make again."""

    def __init__(
        self, request: Request, members: Members, call: ShortCall, record: _Record
    ) -> None:
        self.request = request
        self.response = Response(request)
        self.members = members
        self.call = call
        self.record = record


class ShortCalls:
    """The short calls of one rank. Any thread may run one, or the engine thread decline it."""

    def __init__(
        self,
        exchange: ShortExchange,
        executor: Executor,
        pending: PendingTable,
        process_sets: ProcessSetTable,
        may_run: Callable[[], bool],
    ) -> None:
        """Take part only while `may_run`: others see it before they wait."""
        self._exchange = exchange
        self._executor = executor
        self._pending = pending
        self._process_sets = process_sets
        self._may_run = may_run
        self._is_open = False
        self._released = False
        # Guards the two, and the memory while it is told. Reentrant for signal handlers.
        self._opening = threading.RLock()
        self.completed = 0  # How many calls of this rank were short.
        # By name: calls of whole process sets, and messages, whose names mostly come once.
        self._prepared: dict[str, _Prepared] = {}
        self._messages: dict[str, _Prepared] = {}
        # By the two ranks, the sender first; None where memory does not serve them.
        self._pairs: dict[tuple[int, ...], _Pair | None] = {}

    def run(self, entry: Entry) -> bool:
        """Exchange the data of an entry and complete it; False if it must be reported instead."""
        if entry.size_bytes > LARGE_BYTES or not self.take_part():
            return False
        if entry.request.parties:
            prepared = self._find_message(entry.request, entry.size_bytes)
        else:
            prepared = self._find(entry.request)
        if prepared is None or entry.size_bytes != prepared.call.nbytes:
            return False
        if prepared.record.skip():
            return False
        lock = self._exchange.locks[prepared.call.slot]
        if not lock.acquire(blocking=False):
            return False
        try:
            return self._exchanged(prepared, entry)
        finally:
            lock.release()

    def is_pending(self, entry: Entry) -> bool:
        """Return whether an entry is neither complete nor failed."""
        return self._pending.has(entry)

    def decline(self, entries: Sequence[Entry]) -> None:
        """Tell the others of entries that are reported now, and may be short calls elsewhere."""
        for entry in entries:
            request = entry.request
            prepared = self._prepared.get(request.name)
            if request.parties and self._is_open and entry.size_bytes <= LARGE_BYTES:
                prepared = self._find_message(request, entry.size_bytes)
            if prepared is None or prepared.request != request:
                continue
            if not prepared.call.told:
                self._exchange.decline(prepared.call)
            prepared.call.told = 0

    def close(self) -> None:
        """Take part in no short call any more."""
        with self._opening:
            self._may_run = lambda: False
            self.take_part()

    def release(self) -> None:
        """Give the memory back, after `close`."""
        if not self._released:
            self._released = True
            self._exchange.release()

    def forget(self) -> None:
        """Prepare all calls anew, on all ranks at the same point of the order."""
        self._prepared.clear()
        self._messages.clear()
        self._pairs.clear()

    def take_part(self) -> bool:
        """Return whether this rank takes part; tell the others if that has changed."""
        with self._opening:
            wanted = self._may_run()
            if wanted != self._is_open:
                self._is_open = wanted
                self._exchange.open(wanted)
        return wanted

    def _exchanged(self, prepared: _Prepared, entry: Entry) -> bool:
        call = prepared.call
        call.completed = call.told = 0
        entry.response = prepared.response
        entries: Sequence[Entry] = (entry,)
        if type(entry) is Bundle:
            entries = entry.entries
            set_places(call, entry.sizes, entry.places)
        elif entry.address is not None:
            call.input = call.output = entry.address
        elif call.root == call.index:
            set_data(call, entry.input, entry.input)
        elif prepared.request.dtype:
            set_data(call, entry.input, entry.output(prepared.request.shape))
        if not self._pending.hold(entries):
            return False
        try:
            self._exchange.run(call)
        finally:  # A KeyboardInterrupt comes after the exchange: its result counts.
            prepared.record.note(completed=bool(call.completed))
            if call.completed:
                self.completed += 1
                if self._executor.observers and prepared.request.dtype:
                    self._show(prepared, entry)
            for each in self._pending.let_go(entries, exchanged=bool(call.completed)):
                each.complete()
        return bool(call.completed)

    def _show(self, prepared: _Prepared, entry: Entry) -> None:
        """Show observers a call, as if it had begun when the last member came."""
        names = entry.names if type(entry) is Bundle else (entry.request.name,)
        run = SegmentRun(
            names,
            entry.request.collective,
            entry.size_bytes,
            prepared.call.began_ns * 1e-9,
            time.monotonic(),
            prepared.members.ranks,
            entry.enqueued,
        )
        self._executor.show(run)

    def _find(self, request: Request) -> _Prepared | None:
        """Return the prepared call of a request; None if it cannot be a short one."""
        name = request.name
        known = self._prepared.get(name)
        members = self._process_sets.find(request.process_set_id)
        if known is not None and known.request is request and known.members.ranks == members:
            return known
        if members is None:
            return None
        prepared = self._prepare(request, self._executor.members_of(members))
        if prepared is not None:
            if len(self._prepared) >= MOST_PREPARED:
                self._prepared.clear()
            self._prepared[name] = prepared
        return prepared

    def _prepare(self, request: Request, members: Members) -> _Prepared | None:
        spec = SPECS[request.collective]
        if not spec.short or request.group or members.size < 2:
            return None
        if not self._exchange.among(members):
            return None
        call = self._exchange.prepare(members, _digest(request, members))
        prepared = _Prepared(request, members, call, _Record())
        return prepared if not request.dtype or self._adds(prepared) else None

    def _find_message(self, request: Request, nbytes: int) -> _Prepared | None:
        """Return the prepared call of a message between two ranks; None if it cannot be short."""
        known = self._messages.get(request.name)
        if known is not None and known.request == request:
            return known
        if not nbytes or request.device != HOST_DEVICE:
            return None
        pair = request.root_rank, *request.parties
        if pair not in self._pairs:
            self._pairs[pair] = self._pair_of(request)
        found = self._pairs[pair]
        if found is None:
            return None
        digest = _digest_of(request.name, request.dtype, *request.shape)
        call = self._exchange.message(found.call, digest, nbytes)
        if len(self._messages) >= MOST_PREPARED:
            self._messages.clear()
        prepared = _Prepared(request, found.members, call, found.record)
        self._messages[request.name] = prepared
        return prepared

    def _pair_of(self, request: Request) -> _Pair | None:
        """Return what serves the messages of a pair by memory; None for other ranks."""
        spec = SPECS[request.collective]
        if spec.run is None or not spec.short:  # A set that is formed.
            return None
        members = self._executor.members_of(request.parties)
        if not self._exchange.among(members):
            return None
        if not isinstance(self._executor.backend(request, members), ShmBackend):
            return None
        call = self._exchange.prepare(members, 0)
        call.root = request.parties.index(request.root_rank)
        return _Pair(members, call, _Record())

    def _adds(self, prepared: _Prepared) -> bool:
        """Prepare the data of a call; return whether it is reduced as the data plane would do."""
        request, members = prepared.request, prepared.members
        dtype = numpy_dtype(request.dtype)
        nbytes = SPECS[request.collective].bytes(prepared.response, dtype.itemsize)
        if not 0 < nbytes <= min(LARGE_BYTES, MOST_TO_ADD_BYTES // members.size):
            return False
        if request.device != HOST_DEVICE:
            return False
        if not isinstance(self._executor.backend(request, members), ShmBackend):
            return False  # Also Adasum, which has no arithmetic.
        arithmetic = Arithmetic(dtype, reduction_of(request, members.size))
        if codes(arithmetic) is None:
            return False
        self._exchange.add_data(prepared.call, arithmetic, nbytes)
        return True


def _digest(request: Request, members: Members) -> int:
    """Return a number that is the same on all ranks that mean the same call among `members`."""
    return _digest_of(request, members.ranks)


def _digest_of(*what: object) -> int:
    text = msgpack.packb(what, unicode_errors="backslashreplace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
