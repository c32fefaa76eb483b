"""The earlier answers that one rank remembers, by which reports and orders can name bits.

Owned by the engine thread. The theory of operation in coordinator.py explains bits and evictions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.collectives.table import SPECS, Effect
from hvdlite.common.decisions.response_cache import ResponseCache
from hvdlite.common.engine.pending import PendingTable
from hvdlite.common.plain.entries import Entry
from hvdlite.common.plain.messages import NO_BIT, Eviction, Report, Request, Response, Segment

log = logging.getLogger("hvdlite")


class _SetMemory:
    """The answers that this rank remembers in one process set."""

    def __init__(self) -> None:
        self.cache = ResponseCache()
        # How many joins of all members are complete.
        self.joins = 0
        # Set from the report of this rank's join to its answer: an eviction repeats the report.
        self.join: Entry | None = None

    def request(self, entry: Entry) -> Request:
        """Return the request that is reported in full for `entry`.

        A join carries how many joins and evictions this rank has executed, so that the coordinator
        recognises a join that has crossed an eviction.
        """
        if SPECS[entry.request.collective].effect is not Effect.JOIN:
            return entry.request
        self.join = entry
        log.debug(
            "join of process set %d is reported after %d joins and %d evictions",
            entry.request.process_set_id, self.joins, self.cache.evictions,
        )  # fmt: skip
        return entry.request._replace(shape=(self.joins, self.cache.evictions))


class ResponseMemory:
    """Entries in, reports out; orders in, entries and their answers out."""

    def __init__(self, rank: int, pending: PendingTable) -> None:
        self._rank = rank
        self._pending = pending
        self._sets: dict[int, _SetMemory] = {}

    def reports(self, entries: Iterable[Entry]) -> tuple[Report, ...]:
        """Return the reports of `entries`: by bit where they were answered before."""
        bits: dict[int, list[int]] = {}
        requests: dict[int, list[Request]] = {}
        for entry in entries:
            request = entry.request
            process_set_id = request.process_set_id
            state = self._set(process_set_id)
            bit = state.cache.find(request)
            if bit is None:
                requests.setdefault(process_set_id, []).append(state.request(entry))
            else:
                entry.sent_bit = bit
                bits.setdefault(process_set_id, []).append(bit)
        process_set_ids = dict.fromkeys([*bits, *requests])
        return tuple(
            Report(
                process_set_id,
                (self._rank,),
                tuple(bits.get(process_set_id, ())),
                tuple(requests.get(process_set_id, ())),
            )
            for process_set_id in process_set_ids
        )

    def resolve(self, segment: Segment) -> tuple[list[Response], list[Entry | None]]:
        """Return the answers of a segment and this rank's entries; None if this rank has joined.

        An answer with a bit is remembered together with the request of this rank. That is done even
        for a known bit if this rank has reported in full: it had joined when the bit was given, so
        it remembered no request of its own.
        """
        state = self._set(segment.process_set_id)
        cache = state.cache
        responses = [_recall(cache, i) if isinstance(i, int) else i for i in segment.items]
        entries = self._pending.pop([response.request for response in responses])
        for item, response, entry in zip(segment.items, responses, entries, strict=True):
            known = isinstance(item, int)
            if entry is not None:
                entry.response = response
                if response.bit != NO_BIT and not (known and entry.sent_bit == response.bit):
                    cache.remember(response, entry.request)
            elif response.bit != NO_BIT and not known:
                cache.remember(response, None)
        if state.join is not None and entries[0] is state.join:
            state.join = None
            state.joins += not responses[0].error
        return responses, entries

    def evict(self, eviction: Eviction) -> list[Entry]:
        """Forget a bit; return the entries to report again.

        These are the entry that was reported under the bit, and after it the join of this rank,
        which the coordinator has ignored if it has crossed the eviction.
        """
        state = self._set(eviction.process_set_id)
        name = state.cache.forget(eviction.bit)
        entry = self._pending.find(eviction.process_set_id, name)
        unanswered: list[Entry] = []
        if entry is not None and entry.sent_bit == eviction.bit:
            entry.sent_bit = NO_BIT
            unanswered.append(entry)
        if state.join is not None:
            unanswered.append(state.join)
        return unanswered

    def forget_set(self, process_set_id: int) -> None:
        """Forget a process set that was removed."""
        self._sets.pop(process_set_id, None)

    def requests_of(self, report: Report) -> list[Request]:
        """Return the requests that a report stands for, without bits that are unknown here."""
        requests = list(report.requests)
        cache = self._set(report.process_set_id).cache
        for bit in report.bits:
            with suppress(KeyError):
                requests.append(cache.recall(bit).response.request)
        return requests

    def _set(self, process_set_id: int) -> _SetMemory:
        state = self._sets.get(process_set_id)
        if state is None:
            state = self._sets[process_set_id] = _SetMemory()
        return state


def _recall(cache: ResponseCache, bit: int) -> Response:
    try:
        return cache.recall(bit).response
    except KeyError:
        raise ProtocolError(f"the coordinator names bit {bit}, which nobody gave") from None
