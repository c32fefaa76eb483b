"""When a failed slot is tried again, when it has failed too often, and how long hosts stay away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

WINDOW_SECONDS = 60.0
LONGEST_DELAY_SECONDS = 30.0
# A host whose workers broke that many worlds of the window, without a commit in between, is given
# up; so is a host without a rank that has failed to start a worker in one slot that many times.
WORLDS_BROKEN = 5
STARTS_FAILED = 3
# The same script fails at the same batch: so many resets are tried.
RESETS_AFTER_EXCEPTIONS = 3


@dataclass(frozen=True)
class SlotFailure:
    """A worker of a slot failed at a `time`, when `epoch` was the last world."""

    host: str
    slot: int
    epoch: int
    time: float
    was_member: bool
    exception: bool


class Failures:
    """The failures since the last commit, and those of each slot since it made progress itself.

    `exception`: the script failed, and not the machine.
    """

    def __init__(self) -> None:
        self._failures: list[SlotFailure] = []
        self._script_failed_in: set[int] = set()
        self._rows: dict[tuple[str, int], list[SlotFailure]] = {}  # In a row, by host and slot.

    def add(self, failure: SlotFailure) -> None:
        self._failures.append(failure)
        row = self._rows.setdefault((failure.host, failure.slot), [])
        if row and failure.time > row[-1].time + WINDOW_SECONDS:
            row.clear()
        row.append(failure)
        if failure.exception and failure.was_member:
            self._script_failed_in.add(failure.epoch)

    def note_error(self, epoch: int) -> None:
        """Note that an error of the script has undone world `epoch`, without a loss."""
        self._script_failed_in.add(epoch)

    def failed(self, host: str, slot: int) -> bool:
        """Return whether a worker of the slot has ever failed."""
        return (host, slot) in self._rows

    def progressed(self, epoch: int) -> None:
        """Forget what failed before world `epoch`: a rank committed something in it."""
        self._failures = [each for each in self._failures if each.epoch >= epoch]
        self._script_failed_in = {each for each in self._script_failed_in if each >= epoch}

    def took_part(self, epoch: int, slots: Iterable[tuple[str, int]]) -> None:
        """Forget which workers of `slots` failed before world `epoch`: later ones trained in it."""
        for slot in slots:
            if slot in self._rows:
                self._rows[slot] = [each for each in self._rows[slot] if each.epoch >= epoch]

    def retry_time(self, host: str, slot: int, now: float) -> float:
        """Return when the slot's next worker may start: at once, then after 1, 2, 4... seconds."""
        row = self._rows.get((host, slot), [])
        if len(row) < 2:
            return now
        return row[-1].time + min(2.0 ** min(len(row) - 2, 12), LONGEST_DELAY_SECONDS)

    def cannot_start(self, host: str, now: float) -> bool:
        """Return whether the host, which has no rank, has failed to start workers too often."""
        slots = [each.slot for each in self._recent(host, now) if not each.was_member]
        return any(slots.count(slot) >= STARTS_FAILED for slot in set(slots))

    def breaks_worlds(self, host: str, now: float) -> bool:
        """Return whether workers of the host broke too many worlds."""
        recent = self._recent(host, now)
        broken = {each.epoch for each in recent if each.was_member}
        return len(broken) >= WORLDS_BROKEN

    def script_fails(self) -> bool:
        """Return whether errors have undone too many worlds without a commit in between."""
        return len(self._script_failed_in) > RESETS_AFTER_EXCEPTIONS

    def _recent(self, host: str, now: float) -> list[SlotFailure]:
        start = now - WINDOW_SECONDS
        return [each for each in self._failures if each.host == host and each.time > start]


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
            absence = FOREVER
            if self._range is not None:
                low, high = self._range
                longer = low * 2.0 ** min(self._times[host], 12)
                absence = max(low, min(high, longer + self._uniform() * low))
            self._until[host] = now + absence

    def excluded(self, host: str, now: float) -> bool:
        return now < self._until.get(host, 0.0)

    def all_excluded(self, now: float) -> set[str]:
        return {host for host, end in self._until.items() if now < end}

    def until(self, host: str) -> float:
        """Return when a host may come back; infinity: never."""
        return self._until.get(host, 0.0)

    def next_end(self, now: float) -> float | None:
        """Return when the next host may come back, if any may."""
        return min((end for end in self._until.values() if now < end < FOREVER), default=None)
