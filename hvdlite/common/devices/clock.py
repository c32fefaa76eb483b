"""The clock of a device: when on the host's clock its events have occurred.

A device tells how much time lies between two of its events. One event, whose time on the host's
clock is known, makes times of that. It is taken anew after a while, as the clocks drift.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from hvdlite.common.devices.interface import Context, TimedEvent

REFERENCE_SECONDS = 60.0  # How long a reference is good: clocks drift by some microseconds then.
ATTEMPTS = 3  # The quickest one is the most exact.


class _Reference(NamedTuple):
    event: TimedEvent
    at: float  # Seconds of `time.monotonic`.
    uncertain: float


class DeviceClock:
    """Converts the times of one device. Used by one thread."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._reference: _Reference | None = None

    def span(self, begin: TimedEvent, end: TimedEvent) -> tuple[float, float]:
        """Return when two events have occurred, in seconds of `time.monotonic`."""
        reference = self._reference
        if reference is None or time.monotonic() - reference.at > REFERENCE_SECONDS:
            reference = self._reference = self._refer()
        start = reference.at + begin.seconds_since(reference.event)
        return start, start + end.seconds_since(begin)

    def _refer(self) -> _Reference:
        """Return a new reference, by a stream on which nothing else is queued."""
        stream = self._context.new_stream()
        try:
            return min((self._attempt(stream) for _ in range(ATTEMPTS)), key=lambda each: each[2])
        finally:
            self._context.free_stream(stream)

    def _attempt(self, stream: object) -> _Reference:
        before = time.monotonic()
        event = self._context.record_timed(stream)
        event.synchronize()
        after = time.monotonic()
        return _Reference(event, after, after - before)  # A thread wakes soon after the event.
