"""How long a failed host stays away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

FOREVER = float("inf")
LONGEST_SECONDS = 3600


class Cooldowns:
    """Excluded hosts; times are in seconds.

    The k-th absence of a host takes ``low * 2**k`` and a random part of `low`, at most `high`.
    Without a range, an excluded host never comes back. Raises ValueError for a bad range.
    """

    def __init__(self, cooldown: tuple[int, int] | None, uniform: Callable[[], float]) -> None:
        if cooldown is not None:
            low, high = cooldown
            if not 1 <= low <= high <= LONGEST_SECONDS:
                raise ValueError(
                    f"a cool-down range of {low} to {high} seconds: give two numbers between 1 and "
                    f"{LONGEST_SECONDS}, the smaller one first"
                )
        self._range = cooldown
        self._uniform = uniform
        self._times: Counter[str] = Counter()
        self._until: dict[str, float] = {}

    def exclude(self, host: str, now: float) -> None:
        """Send a host away; one that is away already gets no longer absence."""
        if not self.excluded(host, now):
            self._times[host] += 1
            self._until[host] = now + self._absence(self._times[host])

    def _absence(self, time: int) -> float:
        if self._range is None:
            return FOREVER
        low, high = self._range
        return max(low, min(high, low * 2.0 ** min(time, 12) + self._uniform() * low))

    def excluded(self, host: str, now: float) -> bool:
        """Return whether the host is away."""
        return now < self._until.get(host, 0.0)

    def until(self, host: str) -> float:
        """Return when a host may come back; infinity: never."""
        return self._until.get(host, 0.0)

    def next_end(self, now: float) -> float | None:
        """Return when the next host may come back, if any may."""
        return min((end for end in self._until.values() if now < end < FOREVER), default=None)
