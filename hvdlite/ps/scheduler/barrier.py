"""The barrier of the workers: who waits at it, and who has passed it.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from hvdlite.ps.connections.messages import Answer


class Barrier:
    """`waiting` has the answers that workers wait for, which say how many barriers they met."""

    def __init__(self) -> None:
        self.waiting: dict[int, Answer] = {}
        # Worker -> its process and the barrier that it has passed last, as it counts them.
        self._passed: dict[int, tuple[str, int]] = {}

    def has_passed(self, worker: int, peer: bytes, count: int) -> bool:
        """Return whether a process has passed this barrier, and asks again."""
        process, passed = self._passed.get(worker, ("", 0))
        return process == peer.hex() and count <= passed

    def open(self, peers: Mapping[int, bytes], workers: Collection[int]) -> list[Answer]:
        """Return the answers if each of `workers` waits; `peers` says which process each is.

        The process that comes in the place of one that waited has to come itself.
        """
        for worker, answer in [*self.waiting.items()]:
            if peers.get(worker) != answer.peer:
                del self.waiting[worker]
        if set(workers) - self.waiting.keys():
            return []
        opened, self.waiting = self.waiting, {}
        for worker, answer in opened.items():
            self._passed[worker] = answer.peer.hex(), answer.message.body["count"]
        return [*opened.values()]

    def state(self) -> list[Sequence[Any]]:
        """Return what `load` takes."""
        return [[worker, *passed] for worker, passed in self._passed.items()]

    def load(self, state: Iterable[Sequence[Any]]) -> None:
        self._passed = {worker: (peer, count) for worker, peer, count in state}
