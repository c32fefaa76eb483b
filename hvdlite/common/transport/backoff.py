"""Sleeps between polls that grow while nothing arrives.

MPI cannot block without spinning, so waits poll it. A sleep is a share of the time since something
came last: the share is the delay that sleeping can add. Short sleeps may be a large share; longer
ones, which an idle job makes, are a small share, so that an idle rank costs nearly no time.
"""

from __future__ import annotations

import time

from hvdlite.common.transport.base import CHECK_SECONDS

SHORTEST_SLEEP, BUSY_SLEEP, LONGEST_SLEEP = 20e-6, 4e-3, 20e-3  # In seconds.
BUSY_SHARE, IDLE_SHARE = 1 / 8, 1 / 64  # The first one up to BUSY_SLEEP, then the second one.


class Backoff:
    """The sleeps of one wait."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._next_check = self._start + CHECK_SECONDS

    def seconds(self) -> float:
        """Return how long to sleep now."""
        waited = time.monotonic() - self._start
        busy = min(max(waited * BUSY_SHARE, SHORTEST_SLEEP), BUSY_SLEEP)
        return min(max(waited * IDLE_SHARE, busy), LONGEST_SLEEP)

    def check_is_due(self) -> bool:
        """Return True every CHECK_SECONDS, for checks that are too slow for every poll."""
        now = time.monotonic()
        if now < self._next_check:
            return False
        self._next_check = now + CHECK_SECONDS
        return True
