"""Workers that wait for a table to begin on a server, and which of them gives it its values.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass
class Start:
    """A worker that has said `start` and waits for the table."""

    peer: bytes
    request: int
    clock: int | None  # Its next step; None: it has none, and takes the one that it is given.
    version: int  # Of the values that it has; -1: first ones; -2: none, which others have.
    enters: int = 0  # It takes part from this step on, and not before.
    first: int | None = None  # The worker whose first values all servers take.
    load: int = 0  # The load after which its values were pulled; 0: none.


class Starts:
    """The starts of a table that are not answered yet; `waiting` has them by their workers.

    [Note: first values] Workers may begin with different values, and come to the servers in
    another order to each. All servers take those of the worker that has declared the table
    first. Where it is lost before, all wait until everybody has started, and take those of the
    lowest number. That worker also replaces the values that other servers have of the lost one:
    nobody has pulled them, since no worker goes on before all servers have begun.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, Start] = {}
        self.wanted: int | None = None  # The worker whose values are awaited.
        self.load = 0  # The last load of the table: what was pulled before is no value of it.

    def add(self, worker: int, start: Start) -> None:
        """Take note of a worker that waits, perhaps again."""
        if worker == self.wanted:  # It asks again, as it has not heard that it is wanted.
            self.wanted = None
        self.waiting[worker] = start

    def missing(self, workers: Collection[int], others: Collection[int]) -> set[int]:
        """Return who has not started yet; `others` do not take part in the table."""
        return set(workers) - self.waiting.keys() - set(others)

    def newest(self, workers: Collection[int]) -> int:
        """Return the version of the newest values that `workers` have; -2: none."""
        return max((self.waiting[worker].version for worker in self._offers(workers)), default=-2)

    def want(self, workers: Collection[int], others: Collection[int]) -> Start | None:
        """Choose who is to offer its values; None: it has not come yet."""
        offers, newest = self._offers(workers), self.newest(workers)
        if not offers:  # They take part in what another worker begins.
            return None
        first = next((each.first for each in self.waiting.values() if each.first is not None), None)
        if newest >= 0:
            chosen = min(worker for worker in offers if self.waiting[worker].version == newest)
        elif first is None:
            chosen = min(offers)
        elif first in offers:
            chosen = first
        elif (first in workers and first not in self.waiting) or self.missing(workers, others):
            return None
        else:
            chosen = min(offers)
        self.wanted = chosen
        return self.waiting[chosen]

    def _offers(self, workers: Collection[int]) -> list[int]:
        load = max([self.load, *(each.load for each in self.waiting.values())])
        return [
            worker
            for worker, each in self.waiting.items()
            if each.version >= -1 and each.load == load and worker in workers
        ]
