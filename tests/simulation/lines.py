"""How long what is sent in a world takes: latency, bandwidth, and an order that nothing changes."""

from __future__ import annotations

NO_LIMIT = float("inf")


class Wire:
    """What leaves a host goes over one wire, whose bytes take their time one after the other."""

    __slots__ = ("_bytes_per_second", "_free_at")

    def __init__(self, bytes_per_second: float = NO_LIMIT) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0

    def take(self, now: float, count: int) -> float:
        """Send `count` bytes; return when the last of them has left."""
        self._free_at = max(self._free_at, now) + count / self._bytes_per_second
        return self._free_at


class Line:
    """One direction of a connection, on which nothing overtakes."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = 0.0  # When arrives what was sent last.

    def arrival(self, left: float, latency: float, stalled_until: float = 0.0) -> float:
        """Return when arrives what has left its host at a time."""
        self.last = max(self.last, left + latency, stalled_until)
        return self.last
