"""Counting who is ready: the same on every level of the tree.

This module never sends, sleeps or reads a clock. Ranks are bits of an int: rank r is ``1 << r``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)


def mask_of(ranks: Iterable[int]) -> int:
    """The ranks as bits."""
    mask = 0
    for rank in ranks:
        mask |= 1 << rank
    return mask


def ranks_of(mask: int) -> tuple[int, ...]:
    """The bits as ranks, ascending."""
    return tuple(rank for rank in range(mask.bit_length()) if mask >> rank & 1)


class Readiness(Generic[K]):
    """Which ranks have reported each key, of those that are needed."""

    def __init__(self, needed: int) -> None:
        self._needed = needed  # all that report here, as bits
        self._absent = 0  # of those, the ranks that count as ready for everything: joined ones
        self._arrived: dict[K, int] = {}
        self._since: dict[K, float] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._arrived

    def __len__(self) -> int:
        return len(self._arrived)

    def add(self, key: K, ranks: int, now: float) -> int:
        """`ranks` are ready for `key`: 0, or all that are when that completes (and forgets) it."""
        arrived = self._arrived.get(key, 0) | ranks
        if arrived | self._absent == self._needed:
            self.discard(key)
            return arrived
        if key not in self._arrived:
            self._since[key] = now
        self._arrived[key] = arrived
        return 0

    def discard(self, key: K) -> None:
        """Forget a key."""
        self._arrived.pop(key, None)
        self._since.pop(key, None)

    def take(self, key: K) -> int:
        """Forget a key; who was ready for it."""
        arrived = self._arrived.get(key, 0)
        self.discard(key)
        return arrived

    def excuse(self, ranks: int) -> list[tuple[K, int]]:
        """These count as ready from now on; what that completes, with who is ready, in order."""
        self._absent |= ranks & self._needed
        done = [
            (key, arrived)
            for key, arrived in self._arrived.items()
            if arrived | self._absent == self._needed
        ]
        for key, _ in done:
            self.discard(key)
        return done

    def expect_all(self) -> None:
        """End of all excuses."""
        self._absent = 0

    @property
    def absent(self) -> int:
        """The excused ranks, as bits."""
        return self._absent

    @property
    def all_absent(self) -> bool:
        """Every rank is excused."""
        return self._absent == self._needed

    def take_partial(self, before: float) -> list[tuple[K, int]]:
        """Remove what has waited since before `before`: the keys, and who is ready for them."""
        late = [(key, self._arrived[key]) for key, since in self._since.items() if since < before]
        for key, _ in late:
            self.discard(key)
        return late

    @property
    def oldest(self) -> float | None:
        """Since when the longest waiting key waits; None where nothing does."""
        return next(iter(self._since.values()), None)  # dicts keep the order of arrival

    def waiting(self) -> Iterator[tuple[K, int, float]]:
        """Each key with the ranks that are missing, as bits, and since when it waits."""
        for key, arrived in self._arrived.items():
            yield key, self._needed & ~(arrived | self._absent), self._since[key]


def oldest(counts: Iterable[Readiness[Any]]) -> float | None:
    """Since when the longest waiting key of several counts waits."""
    return min((c.oldest for c in counts if c.oldest is not None), default=None)
