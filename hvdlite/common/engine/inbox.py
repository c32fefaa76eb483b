"""What a rank has enqueued and its engine has not taken yet, and when the engine is woken for it.

What is enqueued waits a little for more, since to negotiate ten tensors together costs little more
than one: until somebody waits for one of them, until they are many bytes, or until the cycle time
is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from enum import Enum, auto

from hvdlite.common.plain.entries import Entry

# The reduction of so many bytes takes longer than a negotiation, so they do not gather further.
# See [Note: why gradients gather twice] in torch/gradient_exchange.py.
ENOUGH_BYTES = 1 << 20


class _Engine(Enum):
    """What the engine thread does."""

    AWAKE = auto()  # it will look into the inbox by itself
    ASLEEP = auto()
    WAKES_SOON = auto()  # it sleeps, and an alarm is set


class Inbox:
    """Any thread puts entries in; the engine thread takes all of them."""

    def __init__(self, wake: Callable[[float], None], gather_seconds: float = 0.0) -> None:
        self._wake = wake
        self._gather_seconds = gather_seconds
        # Guards all below. Reentrant, as a signal handler may enqueue within any of the methods.
        self._lock = threading.RLock()
        self._entries: list[Entry] = []
        self._bytes = 0
        self._engine = _Engine.AWAKE

    def put(self, entries: Sequence[Entry]) -> None:
        """Hand entries to the engine; never waits."""
        with self._lock:
            self._entries.extend(entries)
            for entry in entries:
                self._bytes += entry.size_bytes
                entry.handle.hurry = self.hurry
            within = self._time_to_wake()
        if within is not None:
            self._wake(within)

    def _time_to_wake(self) -> float | None:
        """In how many seconds the engine must wake for the inbox; None: it does by itself."""
        if self._engine is _Engine.AWAKE:
            return None
        if self._gather_seconds == 0 or self._bytes >= ENOUGH_BYTES:
            self._engine = _Engine.AWAKE
            return 0.0
        if self._engine is _Engine.ASLEEP:
            self._engine = _Engine.WAKES_SOON
            return self._gather_seconds
        return None

    def hurry(self) -> None:
        """Somebody waits: gather no more."""
        with self._lock:
            wake = self._engine is not _Engine.AWAKE and bool(self._entries)
            if wake:
                self._engine = _Engine.AWAKE
        if wake:
            self._wake(0.0)

    # -- of the engine thread

    def gather_for(self, seconds: float) -> None:
        """From now on, let what is enqueued wait so long for more."""
        with self._lock:
            self._gather_seconds = seconds

    def may_sleep(self) -> bool:
        """Whether nothing is waiting to be taken; from now on an entry wakes the engine."""
        with self._lock:
            self._engine = _Engine.AWAKE if self._entries else _Engine.ASLEEP
            return not self._entries

    def drain(self) -> list[Entry]:
        """What was enqueued since the last call."""
        with self._lock:
            self._engine = _Engine.AWAKE
            taken, self._entries = self._entries, []
            self._bytes = 0
            return taken

    def remove(self, entries: Container[Entry]) -> None:
        """Take these back: they have failed."""
        with self._lock:
            self._entries = [entry for entry in self._entries if entry not in entries]
