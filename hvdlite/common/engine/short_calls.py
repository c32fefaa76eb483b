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
* The result is that of the data plane: the order of the members, sums by the same code.
* A rank that knows only after the round how large its result is still counts as one that reads: no
  member can complete the next round before this one has taken its result.

A rank that takes the other way says so (`decline`), so that the rest does not wait in vain. All
members count how often that was so, and try by this count again, at the same calls (`Record`). A
rank may have missed some, or have forgotten the count: when a call is answered all members have
reported it, so they take the count of the slot (`agree`).

Calls of a `Series` differ by their numbers alone, and what is prepared serves all of them: the
number is part of the tag, so that only the same ones meet. A number comes once, so nobody counts
its declines.

The gradients of a small step are a `Bundle`: one short call, whose data lie in several places. Its
entries are pending meanwhile, under their own names, and all of them are complete or reported.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgpack

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.collectives.base import Members
from hvdlite.common.collectives.native.short_call import (
    LARGE_BYTES,
    Given,
    Record,
    ShortCallData,
    ShortExchange,
    given,
    meaning_of,
)
from hvdlite.common.collectives.shm import ShmBackend
from hvdlite.common.collectives.table import SPECS
from hvdlite.common.engine.executor import Executor
from hvdlite.common.engine.pending import PendingTable
from hvdlite.common.requests.entries import Bundle, Entry, Key, SegmentRun, Series
from hvdlite.common.requests.messages import Request
from hvdlite.common.requests.process_set_table import ProcessSetTable
from hvdlite.common.tensors.adapter import HOST_DEVICE

MOST_PREPARED = 500  # calls; those without a name never come again


class _Pair(NamedTuple):
    """A sender and a receiver of messages that memory serves."""

    members: Members
    root: int  # The place of the sender.
    record: Record


class ShortCalls:
    """The short calls of one rank. Any thread may run one, or the engine thread decline it."""

    def __init__(
        self,
        rank: int,
        exchange: ShortExchange,
        executor: Executor,
        pending: PendingTable,
        process_sets: ProcessSetTable,
        may_run: Callable[[], bool],
    ) -> None:
        """Take part only while `may_run`: others see it before they wait."""
        self._rank, self._exchange, self._executor = rank, exchange, executor
        self._pending, self._process_sets, self._may_run = pending, process_sets, may_run
        self.is_pending = pending.has  # whether an entry is neither complete nor failed
        self._is_open = False
        self._released = False
        # Guards `_is_open` and `_released`, and keeps the memory mapped while a thread writes it.
        # Reentrant, as a signal handler may make a call, too.
        self._opening = threading.RLock()
        self.completed = 0  # How many calls of this rank were short.
        # By name: calls of whole process sets, and messages, whose names mostly come once.
        self._prepared: dict[str, ShortCallData] = {}
        self._messages: dict[str, ShortCallData] = {}
        # Declined calls until they are answered, by what is reported: of a bundle its first entry.
        self._declined: dict[Key, ShortCallData] = {}
        self._era: object = object()  # What is known of series holds in the era when it was found.
        # By the two ranks, the sender first; None where memory does not serve them.
        self._pairs: dict[tuple[int, ...], _Pair | None] = {}

    def run(self, entry: Entry) -> bool:
        """Exchange the data of an entry and complete it; False if it must be reported instead."""
        if not self.take_part():
            return False
        series = entry.series
        if series is not None:
            prepared = self._find_series(series, entry.size_bytes)
        elif entry.request.parties:
            prepared = self._find_message(entry.request, entry.size_bytes)
        else:
            prepared = self._find(entry.request)
        if prepared is None or prepared.skip(entry):
            return False
        lock = self._exchange.locks[prepared.call.slot]
        if not lock.acquire(blocking=False):
            return False
        try:
            if series is not None:
                prepared.number(entry.number)
            return self._exchanged(prepared, entry)
        finally:
            lock.release()

    def decline(self, entries: Sequence[Entry]) -> None:
        """Tell the others of entries that are reported now, and may be short calls elsewhere."""
        with self._opening:
            if self._released:
                return
            for entry in entries:
                if entry.series is not None:
                    self._decline_numbered(entry.series, entry)
                elif entry.request.parties or entry.request.name in self._prepared:
                    self._decline(entry)

    def _decline(self, entry: Entry) -> None:
        request = entry.request
        prepared = self._prepared.get(request.name)
        if request.parties and self._is_open and entry.size_bytes <= LARGE_BYTES:
            prepared = self._find_message(request, entry.size_bytes)
        if prepared is None or prepared.meaning != meaning_of(request):
            return
        reported = entry.entries[0] if type(entry) is Bundle else entry
        self._declined[reported.key] = prepared
        if not prepared.call.told:
            self._exchange.decline(prepared.call)
        prepared.call.told = 0

    def _decline_numbered(self, series: Series, entry: Entry) -> None:
        """Tell the receiver or sender of a message; a thread may be in another one of the series.

        Members of a collective mostly wait alike, and their record is that of the series.
        """
        if not (series.request.parties and self._is_open):
            return
        prepared = self._find_series(series, entry.size_bytes)
        if prepared is not None:
            self._exchange.decline(prepared.numbered(entry.number))

    def agree(self, entries: Sequence[Entry | None]) -> None:
        """Count declines as the other ranks do, before entries that all have reported are run."""
        if self._declined:
            for entry in entries:
                prepared = None if entry is None else self._declined.pop(entry.key, None)
                if prepared is not None:
                    self._exchange.agree(prepared.call)

    def close(self) -> None:
        """Take part in no short call any more."""
        with self._opening:
            self._may_run = lambda: False
            self.take_part()

    def release(self) -> None:
        """Give the memory back, after `close`."""
        with self._opening:
            if self._released:
                return
            self._released = True  # From here on nobody tells others anything.
        self._exchange.release()

    def forget(self) -> None:
        """Prepare all calls anew, on all ranks at the same point of the order."""
        self._prepared.clear()
        self._messages.clear()
        self._declined.clear()
        self._pairs.clear()
        self._era = object()

    def take_part(self) -> bool:
        """Return whether this rank takes part; tell the others if that has changed."""
        with self._opening:
            wanted = self._may_run()
            if wanted != self._is_open:
                self._is_open = wanted
                self._exchange.open(wanted)
        return wanted

    def _exchanged(self, prepared: ShortCallData, entry: Entry) -> bool:
        call = prepared.call
        call.completed = call.told = 0
        prepared.failure = None
        if not prepared.give(entry):
            return False
        entries = entry.entries if type(entry) is Bundle else (entry,)
        ended: list[Entry] = []
        try:
            if self._pending.hold(entries):
                self._exchange.run(call)
        finally:  # A KeyboardInterrupt comes after the exchange: its result counts.
            try:
                if call.completed:
                    if call.counts:
                        self._take(prepared, entry)
                    if self._executor.observers and prepared.request.dtype:
                        self._show(prepared, entry)
                self._end(prepared, entries, ended)
            except BaseException:  # It has come in here.
                if call.completed and call.counts:
                    self._take(prepared, entry)
                self._end(prepared, entries, ended)
                raise
            completed = bool(call.completed)
            prepared.record.note(completed=completed)
            self.completed += completed
        return completed

    def _end(self, prepared: ShortCallData, entries: Sequence[Entry], ended: list[Entry]) -> None:
        """Complete or fail what has left the table; all of it, also if called again."""
        exchanged = bool(prepared.call.completed)
        error = self._pending.let_go(entries, ended, exchanged=exchanged) or prepared.failure
        while ended:
            each = ended[-1]
            if not each.handle.poll():
                if error is None:
                    each.complete()
                else:
                    each.handle.fail(error)
            ended.pop()

    def _take(self, prepared: ShortCallData, entry: Entry) -> None:
        """Take a result whose size is known by now, once; note why this rank cannot have it.

        The others have theirs. They wait in the next call until this rank has left the round.
        """
        call = prepared.call
        if call.parity < 0:
            return
        memory = None  # Lives until the result is there.
        try:
            memory = prepared.make_room(entry)
        except Exception as error:
            call.output = None
            request = entry.request
            prepared.failure = HorovodInternalError(
                f"rank {self._rank} could not take the result of {request.collective} "
                f"'{request.name}': {type(error).__name__}: {error}",
                rank=self._rank,
                job_goes_on=True,
            )
        self._exchange.take(call)
        del memory

    def _show(self, prepared: ShortCallData, entry: Entry) -> None:
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

    def _find_series(self, series: Series, nbytes: int) -> ShortCallData | None:
        """Return the prepared call of a series; None if it cannot be a short one."""
        request, known = series.request, series.short
        ranks = request.parties or self._process_sets.find(request.process_set_id)
        if known is not None and known[0] is self._era and known[2] == ranks:
            found: ShortCallData | None = known[1]
            return found
        prepared = None
        if request.parties:
            prepared = self._prepare_message(request, nbytes)
        elif ranks is not None:
            prepared = self._prepare(request, self._executor.members_of(ranks))
        if prepared is not None:
            prepared.record = Record()
        series.short = self._era, prepared, ranks
        return prepared

    def _find(self, request: Request) -> ShortCallData | None:
        """Return the prepared call of a request; None if it cannot be a short one."""
        known = self._prepared.get(request.name)
        ranks = self._process_sets.find(request.process_set_id)
        if known is not None and known.is_for(request, ranks):
            return known
        if ranks is None:
            return None
        prepared = self._prepare(request, self._executor.members_of(ranks))
        if prepared is not None:
            if len(self._prepared) >= MOST_PREPARED:
                self._prepared.clear()
            self._prepared[request.name] = prepared
        return prepared

    def _prepare(self, request: Request, members: Members) -> ShortCallData | None:
        if not SPECS[request.collective].short or request.group or members.size < 2:
            return None
        if not self._exchange.among(members):
            return None
        gives = given(request, members) if request.dtype else Given(0)
        if gives is None:
            return None
        call = self._exchange.prepare(members, _digest_of(meaning_of(request), members.ranks))
        if request.dtype:
            if not isinstance(self._executor.backend(request, members), ShmBackend):
                return None
            self._exchange.add_data(call, gives)
        return ShortCallData(request, members, call, gives, Record())

    def _find_message(self, request: Request, nbytes: int) -> ShortCallData | None:
        """Return the prepared call of a message between two ranks; None if it cannot be short."""
        known = self._messages.get(request.name)
        if known is not None and known.request == request:
            return known
        prepared = self._prepare_message(request, nbytes)
        if prepared is not None:
            if len(self._messages) >= MOST_PREPARED:
                self._messages.clear()
            self._messages[request.name] = prepared
        return prepared

    def _prepare_message(self, request: Request, nbytes: int) -> ShortCallData | None:
        if not 0 < nbytes <= LARGE_BYTES or request.device != HOST_DEVICE:
            return None
        pair = request.root_rank, *request.parties
        if pair not in self._pairs:
            self._pairs[pair] = self._pair_of(request)
        found = self._pairs[pair]
        if found is None:
            return None
        digest = _digest_of(request.name, request.dtype, *request.shape)
        gives = Given(nbytes, root=found.root)
        call = self._exchange.prepare(found.members, digest)
        self._exchange.add_data(call, gives)
        return ShortCallData(request, found.members, call, gives, found.record)

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
        return _Pair(members, request.parties.index(request.root_rank), Record())


def _digest_of(*what: object) -> int:
    """Return a number that is the same on all ranks that mean the same."""
    text = msgpack.packb(what, unicode_errors="backslashreplace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
