"""The earlier answers that one rank remembers, by which reports and orders can name bits.

Owned by the engine thread. The theory of operation in coordinator.py explains bits and evictions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache

from hvdlite.common.base.bitsets import NO_NUMBERS, NumberSet
from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.collectives.table import SPECS, Effect
from hvdlite.common.decisions.response_cache import ResponseCache
from hvdlite.common.engine.pending import PendingTable
from hvdlite.common.requests.entries import Entry, Key, key_of
from hvdlite.common.requests.messages import (
    NO_BIT,
    Carried,
    Eviction,
    Report,
    Request,
    Response,
    Segment,
)

log = logging.getLogger("hvdlite")

_MOST_SEGMENTS = 1024  # That are remembered as a whole, in each process set.


class _SetMemory:
    """The answers that this rank remembers in one process set."""

    def __init__(self) -> None:
        self.cache = ResponseCache()
        # The answers of segments that consist of bits, and the keys of their entries: a step has
        # the segments of the last. Emptied when what a bit stands for changes.
        self._segments: dict[tuple[Response | int, ...], tuple[list[Response], list[Key]]] = {}
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

    def answers(self, items: tuple[Response | int, ...]) -> tuple[list[Response], list[Key]]:
        """Return the answers of a segment with these items, and the keys of their entries.

        Raises `ProtocolError`.
        """
        known = self._segments.get(items)
        if known is not None:
            return known
        cache = self.cache
        responses = [_recall(cache, i) if isinstance(i, int) else i for i in items]
        answers = responses, [key_of(response.request) for response in responses]
        if all(isinstance(item, int) for item in items):
            if len(self._segments) >= _MOST_SEGMENTS:
                self._segments.clear()
            self._segments[items] = answers
        return answers

    def remember(self, response: Response, request: Request | None) -> None:
        self._segments.clear()
        self.cache.remember(response, request)

    def forget(self, bit: int) -> str:
        """Execute an eviction; return the name of the tensor, or '' if the bit was unknown."""
        self._segments.clear()
        return self.cache.forget(bit)


class ResponseMemory:
    """Entries in, reports out; orders in, entries and their answers out."""

    def __init__(self, rank: int, pending: PendingTable) -> None:
        self._rank = rank
        self._pending = pending
        self._sets: dict[int, _SetMemory] = {}
        # Returns the data that an entry sends with its report, or None; None where none does.
        self.data_of: Callable[[Entry], bytes | None] | None = None
        # How many entries were reported, and how many of them by a bit.
        self.reported = self.reported_by_bit = 0

    def reports(self, entries: Sequence[Entry]) -> tuple[Report, ...]:
        """Return the reports of `entries`: by bit where they were answered before.

        Only a tensor that is reported alone has its data with it: many are sooner reduced together.
        """
        sets: dict[int, tuple[list[int], list[Request]]] = {}
        last, find = -1, None
        for entry in entries:
            request = entry.request
            if request.process_set_id != last or find is None:
                last = request.process_set_id
                bits, requests = sets.setdefault(last, ([], []))
                state = self._set(last)
                find = state.cache.find
            bit = find(request)
            if bit is None:
                requests.append(state.request(entry))
            else:
                entry.sent_bit = bit
                bits.append(bit)
        for bits, requests in sets.values():
            self.reported += len(bits) + len(requests)
            self.reported_by_bit += len(bits)
        reports = tuple(
            Report(process_set_id, (self._rank,), _bit_set(tuple(bits)), tuple(requests))
            for process_set_id, (bits, requests) in sets.items()
        )
        if self.data_of is None or len(entries) != 1 or entries[0].sent_bit == NO_BIT:
            return reports
        data = self.data_of(entries[0])
        if data is None:
            return reports
        return (reports[0]._replace(carried=(Carried(entries[0].sent_bit, self._rank, data),)),)

    def resolve(self, segment: Segment) -> tuple[list[Response], list[Entry | None]]:
        """Return the answers of a segment and this rank's entries; None if this rank has joined.

        An answer with a bit is remembered together with the request of this rank. That is done even
        for a known bit if this rank has reported in full: it had joined when the bit was given, so
        it remembered no request of its own.
        """
        state = self._set(segment.process_set_id)
        responses, keys = state.answers(segment.items)
        entries = self._pending.pop(keys)
        for item, response, entry in zip(segment.items, responses, entries, strict=True):
            if entry is not None:
                entry.response = response
                if entry.sent_bit != item and response.bit != NO_BIT:
                    state.remember(response, entry.request)
            elif response.bit != NO_BIT and not isinstance(item, int):
                state.remember(response, None)
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
        name = state.forget(eviction.bit)
        entry = self._pending.find(eviction.process_set_id, name)
        unanswered: list[Entry] = []
        if entry is not None and entry.sent_bit == eviction.bit:
            entry.sent_bit = NO_BIT
            unanswered.append(entry)
        if state.join is not None:
            unanswered.append(state.join)
        return unanswered

    def forget_set(self, process_set_id: int) -> None:
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


@lru_cache(256)
def _bit_set(bits: tuple[int, ...]) -> NumberSet:
    """Return the bits as a set: a step reports the bits of the last one."""
    return NumberSet.of(bits) if bits else NO_NUMBERS


def _recall(cache: ResponseCache, bit: int) -> Response:
    try:
        return cache.recall(bit).response
    except KeyError:
        raise ProtocolError(f"the coordinator names bit {bit}, which nobody gave") from None
