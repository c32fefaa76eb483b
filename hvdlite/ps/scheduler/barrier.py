"""The barrier of the workers: who waits at it, and who has passed it.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdlite.ps.connections.messages import Answer

SAVE, LOAD = "save", "load"


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


# Whose turn it is to save or load: the scheduler lets one worker after another do it.
#
# All workers call `ps.load`, and the first one does it for all: the second call of a worker is the
# second load of the job. A worker that comes when others have made steps loads nothing any more.
#
# This module never sends, sleeps or reads a clock.


@dataclass
class CheckpointOrder:
    """The turns. `steps` are those before the steps that tables count, since the last load."""

    loads: int = 0  # How many the job has made.
    steps: Mapping[str, int] = field(default_factory=dict)
    _turn: int = 0
    _holder: bytes | None = None  # The process that saves or loads.
    _request: int = 0  # With which it has asked.

    def ask(
        self, peer: bytes, request: int, body: Mapping[str, Any], peers: Collection[bytes], now: int
    ) -> dict[str, Any] | None:
        """Return what a worker hears that wants to save or load; None: it is to wait.

        A turn is `now`, a number that rises, or 0 where another worker has loaded for it. `peers`
        are the processes that are there: the turn of one that is lost is over, as is that of one
        in whose place another one has come, which need not save or load.
        """
        if self._holder == peer and self._request == request:
            return self._answer(self._turn)  # It was sent again.
        if self._holder is not None and self._holder != peer and self._holder in peers:
            return None
        if body["what"] == LOAD and (body["number"] <= self.loads or body["late"]):
            return self._answer(0)
        self._holder, self._request = peer, request
        self._turn = max(now, self._turn + 1)
        return self._answer(self._turn)

    def _answer(self, turn: int) -> dict[str, Any]:
        return {"turn": turn, "loads": self.loads, "steps": dict(self.steps)}

    def end(self, turn: int, steps: Mapping[str, int] | None) -> None:
        """Take note that a turn is over, with these `steps` of each table where it was a load."""
        if turn < self._turn or (turn == self._turn and self._holder is None):
            return  # A turn that is not known is one of a scheduler from before this one.
        self._turn, self._holder = turn, None
        if steps is not None:
            self.loads += 1
            self.steps = dict(steps)
