"""Counting who is ready for what is new: by name. The same on every level of the tree.

Requests that are alike are held once, with their ranks as a mask, so that neither the memory nor
the time follows the number of ranks. This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from hvdlite.common.plain.messages import Request

Alike: TypeAlias = dict[Request, int]  # each request for one name, with the ranks that made it


def everyone(alike: Alike) -> int:
    """All ranks that made one of the requests."""
    ranks = 0
    for mask in alike.values():
        ranks |= mask
    return ranks


@dataclass
class _Asked:
    since: float
    ranks: int = 0
    alike: Alike = field(default_factory=dict)


class RequestReadiness:
    """Which ranks have asked for each name, and for what, of those that are needed."""

    def __init__(self, needed: int) -> None:
        self._needed = needed  # all that report here, as bits
        self._absent = 0  # of those, the ranks that count as ready for everything: joined ones
        self._asked: dict[str, _Asked] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._asked

    def add(self, request: Request, ranks: int, now: float) -> Alike:
        """`ranks` ask for this: all requests for its name, when that completes (and forgets) it."""
        asked = self._asked.get(request.name)
        if asked is None:
            asked = self._asked[request.name] = _Asked(now)
        asked.ranks |= ranks
        asked.alike[request] = asked.alike.get(request, 0) | ranks
        return self.take(request.name) if self._complete(asked) else {}

    def take(self, name: str) -> Alike:
        """Forget a name; what was asked for."""
        asked = self._asked.pop(name, None)
        return asked.alike if asked else {}

    def excuse(self, ranks: int) -> list[Alike]:
        """These count as ready from now on; what that completes (and forgets), in order."""
        self._absent |= ranks & self._needed
        done = [name for name, asked in self._asked.items() if self._complete(asked)]
        return [self.take(name) for name in done]

    def expect(self, ranks: int) -> None:
        """These are needed again."""
        self._absent &= ~ranks

    def take_partial(self, before: float) -> list[Alike]:
        """Remove what has waited since before `before`."""
        late = [name for name, asked in self._asked.items() if asked.since < before]
        return [self.take(name) for name in late]

    @property
    def oldest(self) -> float | None:
        """Since when the longest waiting name waits; None where nothing does."""
        for asked in self._asked.values():  # dicts keep the order of arrival
            return asked.since
        return None

    def waiting(self) -> Iterator[tuple[Request, int, float]]:
        """Each name by one of its requests, the ranks that are missing, and since when it waits."""
        for asked in self._asked.values():
            missing = self._needed & ~(asked.ranks | self._absent)
            yield next(iter(asked.alike)), missing, asked.since

    def _complete(self, asked: _Asked) -> bool:
        return asked.ranks | self._absent == self._needed


def earliest(times: Iterable[float | None]) -> float | None:
    """The first of those times that there are."""
    return min((time for time in times if time is not None), default=None)
