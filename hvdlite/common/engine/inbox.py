"""The inbox of an engine: entries that were enqueued, and the decision when to wake the engine.

Entries gather for a moment, since negotiating ten tensors together costs little more than one:
until a thread waits for one of them, until they hold many bytes, or until the cycle time is over.
Where ranks take all cores, that time begins anew with further entries, up to `MOST_CYCLES` times:
an engine that wakes there stops the thread that still enqueues, and negotiates twice.

The engine drains all that has gathered whenever it is awake, but for the entry of a thread that has
said that it waits next: it may be a short call, and the ranks that wait for it would wait in vain.
That entry is kept for the cycle time at most, as a KeyboardInterrupt may come before the wait.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Container, Sequence
from enum import Enum, auto

from hvdlite.common.base.topology import Topology
from hvdlite.common.engine.short_calls import ShortCalls
from hvdlite.common.requests.entries import Entry
from hvdlite.common.requests.handles import Handle

# The reduction of so many bytes takes longer than a negotiation, so they do not gather further,
# unless the engine has no core of its own: then it would only interrupt the thread that enqueues.
# See [Note: why gradients gather twice] in torch/optimizer/gradient_exchange.py.
WAKING_BYTES = 1 << 20
MOST_CYCLES = 5


def waking_bytes(topology: Topology, cores: int) -> float:
    """Return how many bytes wake the engine at once: no number does where ranks take all cores."""
    return math.inf if topology.fills(cores) else WAKING_BYTES


class _Engine(Enum):
    """Whether the engine thread sleeps."""

    AWAKE = auto()  # The engine will drain the inbox without being woken.
    ASLEEP = auto()
    WAKES_SOON = auto()  # The engine sleeps, and a wake-up is scheduled.


class Inbox:
    """Any thread puts entries in; the engine thread drains them all at once."""

    def __init__(
        self,
        wake: Callable[[float], None],
        gather_seconds: float = 0.0,
        short_calls: ShortCalls | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        enough: float = WAKING_BYTES,
    ) -> None:
        """Wake the engine by `wake`, which is given the seconds until then.

        A thread that waits for an entry tries `short_calls` first. `enough` bytes gather no
        further.
        """
        self._wake, self._gather_seconds, self._short_calls = wake, gather_seconds, short_calls
        self._clock, self._enough = clock, enough
        self._gathers_on = math.isinf(enough)  # no core is free for the engine
        # Guards all attributes below. Reentrant, as a signal handler may enqueue within any method.
        self._lock = threading.RLock()
        self._entries: list[Entry] = []
        self._bytes = 0
        self._engine = _Engine.AWAKE
        self._drains = 0  # So a thread can tell whether the engine still sleeps as it has seen it.
        # Where a wake-up is scheduled: from when on it may be put off, which is when half of the
        # time until then is over, and until when further entries may put it off.
        self._put_off_after = self._put_off_until = 0.0
        # Where ranks take all cores: when the last entry came, and when the engine wakes for it.
        self._came = self._due = 0.0
        self._hurries = False  # A thread waits for what is here.
        # The entry that a thread waits for next, and until when it is kept from the engine.
        self._kept: Entry | None = None
        self._kept_until = 0.0

    def put(self, entries: Sequence[Entry], *, waits: bool = False) -> None:
        """Hand entries to the engine; never waits.

        `waits` says that the calling thread waits for them next.
        """
        with self._lock:
            try:
                for entry in entries:
                    entry.handle.queue = self
                    self._bytes += entry.size_bytes
            finally:  # Also for a KeyboardInterrupt: a handle with a queue has its entry there.
                self._entries.extend(entries)
            if waits and len(entries) == 1 and self._short_calls is not None:
                self._kept, self._kept_until = entries[0], self._clock() + self._gather_seconds
            within, drains = None, self._drains
            if self._engine is not _Engine.AWAKE:
                within = self._time_to_wake(first=len(self._entries) == len(entries))
        if within is not None:
            self._wake_from(drains, within)

    def _wake_from(self, drains: int, within: float) -> None:
        """Wake the engine from the sleep after so many drains, and note that it will be awake.

        In this order: a KeyboardInterrupt between both must not let others rely on a wake-up that
        never comes.
        """
        self._wake(within)
        with self._lock:
            if self._engine is not _Engine.AWAKE and self._drains == drains:
                self._engine = _Engine.WAKES_SOON if within else _Engine.AWAKE

    def _time_to_wake(self, *, first: bool) -> float | None:
        """Return in how many seconds to wake the engine, which sleeps; None if it is not needed.

        The entries before the `first` ones may have been short calls, whose wake-up is still to
        come: it is put off, so that the engine sleeps while one short call follows the other. Where
        ranks take all cores, later entries put it off as well.
        """
        if self._gather_seconds == 0 or self._bytes >= self._enough:
            self._kept = None
            return 0.0
        scheduled = self._engine is _Engine.WAKES_SOON
        if scheduled and not first and not self._gathers_on:
            return None
        now = self._came = self._clock()
        if first:
            self._put_off_until = now + (MOST_CYCLES - 1) * self._gather_seconds
        if scheduled and (now < self._put_off_after or now > self._put_off_until):
            return None
        self._put_off_after = now + self._gather_seconds / 2
        self._due = now + self._gather_seconds
        return self._gather_seconds

    def hurry(self) -> None:
        """Wake the engine at once: a thread waits for an entry, so nothing more gathers."""
        with self._lock:
            self._kept, self._hurries = None, bool(self._entries)
            wake, drains = self._engine is not _Engine.AWAKE and bool(self._entries), self._drains
        if wake:
            self._wake_from(drains, 0.0)

    def attend(self, handle: Handle) -> None:
        """Do what completes a handle soonest, in a thread that waits for it.

        An entry that nobody else has taken yet may be a short call. If others have gathered before
        it, they are reported together, unless it has no data.
        """
        short_calls, entry = self._short_calls, None
        if short_calls is not None:
            with self._lock:
                latest = self._entries[-1] if self._entries else None
                if latest is not None and latest.handle is handle:
                    entry = latest if len(self._entries) == 1 or not latest.size_bytes else None
        if entry is None or short_calls is None:
            self.hurry()
            return
        try:
            with self._lock:
                taken = bool(self._entries) and self._entries[-1] is entry
                if taken:  # From here on the handle has no queue.
                    self._bytes -= entry.size_bytes
                    self._kept = entry.handle.queue = None
                    self._entries.pop()
            if taken:  # Else others have taken it.
                short_calls.run(entry)
            self._put_back(entry, short_calls)
        except BaseException:  # A KeyboardInterrupt: the other ranks need this entry.
            self._put_back(entry, short_calls)
            raise

    def _put_back(self, entry: Entry, short_calls: ShortCalls) -> None:
        """Let the engine have an entry that was taken in vain, or is still there."""
        if entry.handle.queue is None:
            if not short_calls.is_pending(entry):
                return
            self.put([entry])
        self.hurry()

    # -- of the engine thread

    def gather_for(self, seconds: float) -> None:
        """Set how long entries wait for more from now on."""
        with self._lock:
            self._gather_seconds = seconds

    def may_sleep(self) -> bool:
        """Return whether there is nothing to drain; if so, the next entry wakes the engine.

        It wakes in time for an entry that is kept, and for others that still gather.
        """
        with self._lock:
            if not self._entries:
                self._engine = _Engine.ASLEEP
                return True
            left = self._kept_until - self._clock() if self._keeps(self._entries) else 0.0
            if self._still_come():
                left = self._due - self._clock()
            elif len(self._entries) > 1:
                left = 0.0
            if left <= 0:
                self._engine = _Engine.AWAKE
                return False
            self._engine = _Engine.WAKES_SOON
        self._wake(left)
        return True

    def drain(self, *, everything: bool = False, gathers: bool = True) -> list[Entry]:
        """Remove and return all entries, in the order in which they were enqueued.

        An entry that is kept stays, unless others came after it, or `everything` is wanted. All
        stay where a message has woken the engine and more entries are about to come, if the engine
        `gathers`: it has nothing else to do until then.
        """
        with self._lock:
            self._engine = _Engine.AWAKE
            self._drains += 1
            if gathers and not everything and self._still_come():
                return []
            entries, self._entries = self._entries, []
            self._bytes, self._hurries = 0, False
            if not everything and self._keeps(entries) and self._clock() < self._kept_until:
                self._entries.append(entries.pop())
                self._bytes = self._entries[0].size_bytes
            else:
                self._kept = None
            return entries

    def _still_come(self) -> bool:
        """Return whether a thread enqueues, and goes on as soon as the engine leaves it the core.

        Then one entry has followed the other a moment ago, and nobody waits for one of them.
        """
        if not self._gathers_on or not self._entries or self._hurries:
            return False
        return self._clock() < min(self._came + self._gather_seconds / 4, self._due)

    def _keeps(self, entries: Sequence[Entry]) -> bool:
        """Return whether the last of `entries` is kept: what came after it must not overtake it."""
        return self._kept is not None and bool(entries) and entries[-1] is self._kept

    def remove(self, entries: Container[Entry]) -> None:
        with self._lock:
            self._entries = [entry for entry in self._entries if entry not in entries]
            self._bytes = sum(entry.size_bytes for entry in self._entries)
