"""The tensors of one rank between enqueue and answer, and what it remembers of earlier answers.

Any thread adds; the engine thread takes, resolves and fails. What is enqueued waits a little for
more, since to negotiate ten tensors together costs little more than one: until somebody waits for
one of them, until they are many bytes, or until the cycle time is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum, auto

from hvdlite.common.base.errors import HorovodInternalError, ProtocolError
from hvdlite.common.decisions.response_cache import ResponseCache
from hvdlite.common.plain.entries import Entry
from hvdlite.common.plain.messages import NO_BIT, Eviction, Report, Request, Response, Segment

Key = tuple[int, str]  # process set, name
ENOUGH_BYTES = 1 << 20  # to travel takes longer than to agree on it: more need not gather


class _Engine(Enum):
    """What the engine thread does."""

    AWAKE = auto()  # it will look into the inbox by itself
    ASLEEP = auto()
    WAKES_SOON = auto()  # it sleeps, and an alarm is set


class TensorQueue:
    """Pending entries by process set and name."""

    def __init__(
        self, rank: int, wake: Callable[[float], None], gather_seconds: float = 0.0
    ) -> None:
        self._rank = rank
        self._wake = wake
        self._gather_seconds = gather_seconds
        self._lock = threading.Lock()  # guards the next five
        self._pending: dict[Key, Entry] = {}
        self._inbox: list[Entry] = []
        self._closed: HorovodInternalError | None = None
        self._inbox_bytes = 0
        self._engine = _Engine.AWAKE
        self._caches: dict[int, ResponseCache] = {}  # of the engine thread, as is:
        self._running: list[Entry] = []  # resolved last: their handles may be open

    def add(self, entries: Sequence[Entry]) -> None:
        """Enqueue; all or none. Raises `ValueError` for a name that is pending already, and
        `HorovodInternalError` when the engine has ended."""
        with self._lock:
            if self._closed is not None:
                raise HorovodInternalError(str(self._closed), rank=self._closed.rank)
            added: dict[Key, Entry] = {}
            for entry in entries:
                key = _key(entry.request)
                if key in self._pending or key in added:
                    raise ValueError(_duplicate(entry.request.name, self._rank))
                added[key] = entry
            self._pending.update(added)
            self._inbox.extend(entries)
            for entry in entries:
                self._inbox_bytes += entry.size_bytes
                entry.handle.hurry = self.hurry
            within = self._time_to_wake()
        if within is not None:
            self._wake(within)

    def _time_to_wake(self) -> float | None:
        """In how many seconds the engine must wake for the inbox; None: it does by itself."""
        if self._engine is _Engine.AWAKE:
            return None
        if self._gather_seconds == 0 or self._inbox_bytes >= ENOUGH_BYTES:
            self._engine = _Engine.AWAKE
            return 0.0
        if self._engine is _Engine.ASLEEP:
            self._engine = _Engine.WAKES_SOON
            return self._gather_seconds
        return None

    def hurry(self) -> None:
        """Somebody waits: gather no more."""
        with self._lock:
            wake = self._engine is not _Engine.AWAKE and bool(self._inbox)
            if wake:
                self._engine = _Engine.AWAKE
        if wake:
            self._wake(0.0)

    def gather_for(self, seconds: float) -> None:
        """From now on, let what is enqueued wait so long for more."""
        with self._lock:
            self._gather_seconds = seconds

    def may_sleep(self) -> bool:
        """Whether nothing is waiting to be taken; from now on an entry wakes the engine."""
        with self._lock:
            self._engine = _Engine.AWAKE if self._inbox else _Engine.ASLEEP
            return not self._inbox

    def take(self) -> list[Entry]:
        """What was enqueued since the last call."""
        with self._lock:
            self._engine = _Engine.AWAKE
            taken, self._inbox = self._inbox, []
            self._inbox_bytes = 0
            return taken

    def close(self, error: HorovodInternalError) -> None:
        """Refuse everything from now on, and fail what is pending or running. Engine thread."""
        with self._lock:
            if self._closed is None:
                self._closed = error
            failed, self._pending, self._inbox = list(self._pending.values()), {}, []
        running, self._running = self._running, []
        for entry in [*running, *failed]:
            if not entry.handle.poll():
                entry.handle.fail(error)

    # -- of the engine thread

    def reports(self, entries: Iterable[Entry]) -> tuple[Report, ...]:
        """How the coordinator is told of `entries`: by bit where they were answered before."""
        bits: dict[int, list[int]] = {}
        requests: dict[int, list[Request]] = {}
        for entry in entries:
            request = entry.request
            number = request.process_set_id
            bit = self._cache(number).find(request)
            if bit is None:
                requests.setdefault(number, []).append(request)
            else:
                entry.sent_bit = bit
                bits.setdefault(number, []).append(bit)
        numbers = dict.fromkeys([*bits, *requests])
        return tuple(
            Report(n, (self._rank,), tuple(bits.get(n, ())), tuple(requests.get(n, ())))
            for n in numbers
        )

    def resolve(self, segment: Segment) -> tuple[list[Response], list[Entry | None]]:
        """The answers of a segment, and this rank's entry for each: None if it has joined."""
        cache = self._cache(segment.process_set_id)
        responses = [
            self._recall(cache, item) if isinstance(item, int) else item for item in segment.items
        ]
        with self._lock:
            entries = [self._pending.pop(_key(each.request), None) for each in responses]
        self._running = []
        for item, response, entry in zip(segment.items, responses, entries, strict=True):
            known = isinstance(item, int)
            if entry is not None:
                entry.response = response
                self._running.append(entry)
                if response.bit != NO_BIT and not (known and entry.sent_bit == response.bit):
                    cache.remember(response, entry.request)
            elif response.bit != NO_BIT and not known:
                cache.remember(response, None)
        return responses, entries

    def evict(self, eviction: Eviction) -> Entry | None:
        """Forget a bit; the entry that was reported under it and must be reported again."""
        name = self._cache(eviction.process_set_id).forget(eviction.bit)
        with self._lock:
            entry = self._pending.get((eviction.process_set_id, name))
        if entry is None or entry.sent_bit != eviction.bit:
            return None
        entry.sent_bit = NO_BIT
        return entry

    def drop_set(self, number: int) -> None:
        """A process set is no more: what is pending in it fails."""
        self._caches.pop(number, None)
        with self._lock:
            keys = [key for key in self._pending if key[0] == number]
            dropped = [self._pending.pop(key) for key in keys]
            self._inbox = [entry for entry in self._inbox if entry not in dropped]
        for entry in dropped:
            entry.handle.fail(
                HorovodInternalError(f"'{entry.request.name}': Process set has been removed")
            )

    def requests_of(self, report: Report) -> list[Request]:
        """What a report asks for, without the bits that are unknown here."""
        requests = list(report.requests)
        for bit in report.bits:
            with suppress(KeyError):
                requests.append(self._cache(report.process_set_id).recall(bit).response.request)
        return requests

    def _cache(self, number: int) -> ResponseCache:
        return self._caches.setdefault(number, ResponseCache())

    def _recall(self, cache: ResponseCache, bit: int) -> Response:
        try:
            return cache.recall(bit).response
        except KeyError:
            raise ProtocolError(f"the coordinator names bit {bit}, which nobody gave") from None


def _key(request: Request) -> Key:
    return request.process_set_id, request.name


def _duplicate(name: str, rank: int) -> str:
    return (
        f"'{name}' on rank {rank} has the same name as another tensor that is being processed: "
        "wait for it (synchronize), or give this one another name"
    )
