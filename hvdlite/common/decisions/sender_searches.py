"""Ranks that receive from any rank: which of the messages that they await has been sent first.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterator

from hvdlite.common.base.bitsets import mask_of
from hvdlite.common.requests.messages import Request


def senders(search: Request) -> dict[str, int]:
    """Return the names of the messages that a receiver awaits, and the rank that sends each."""
    return dict(zip(search.settings.split("\n"), search.shape, strict=True))


class SenderSearches:
    """The searches for which no message has been sent so far."""

    def __init__(self) -> None:
        self._searches: dict[Request, float] = {}  # Since when each waits.
        self._by_message: dict[str, Request] = {}

    def add(self, search: Request, now: float) -> None:
        """Keep a search until `sent` names one of its messages."""
        self._searches[search] = now
        self._by_message |= dict.fromkeys(senders(search), search)

    def sent(self, message: str) -> Request | None:
        """Forget and return the search that awaits a message, which was sent now."""
        search = self._by_message.get(message)
        if search is not None:
            self._forget(search)
        return search

    def pop_hopeless(self, departed: int, joined: int) -> list[Request]:
        """Forget and return the searches without a receiver, or without a sender that is left."""
        hopeless = [
            each
            for each in self._searches
            if mask_of(each.parties) & departed or not mask_of(each.shape) & ~(departed | joined)
        ]
        for search in hopeless:
            self._forget(search)
        return hopeless

    def waiting(self) -> Iterator[tuple[Request, int, float]]:
        """Yield each search, the mask of the ranks that may send, and since when it waits."""
        for search, since in self._searches.items():
            yield search, mask_of(search.shape), since

    @property
    def oldest(self) -> float | None:
        """Since when the oldest search waits; None without any."""
        return next(iter(self._searches.values()), None)

    def _forget(self, search: Request) -> None:
        del self._searches[search]
        for message in senders(search):
            self._by_message.pop(message, None)
