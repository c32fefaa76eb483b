"""The barrier of the workers: who waits at it, and who has passed it.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdlite.ps.connections.messages import Answer, Message

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
# A load undoes what was pushed before it, on all servers or on none of them: it begins when each
# worker holds its pushes back, and has said at which step it stands, as in a change of the number
# of servers (see `Change`). Of these there is none meanwhile.
#
# This module never sends, sleeps or reads a clock.


@dataclass
class CheckpointOrder:
    """The turns. `steps` are those before the steps that tables count, since the last load.

    They are what the worker that has made it says.
    """

    loads: int = 0  # How many the job has made.
    steps: Mapping[str, Any] = field(default_factory=dict)
    turn: int = 0
    _holder: bytes | None = None  # The process that saves or loads.
    _request: int = 0  # With which it has asked.
    _loads: bool = False  # Whether it loads, and not saves.
    _begun: bool = False  # Whether it has heard that it is its turn.
    # Of a load: workers that hold their pushes back -> the next step of each table.
    _clocks: dict[int, Mapping[str, int]] = field(default_factory=dict)

    @classmethod
    def again(
        cls, loads: int, steps: Mapping[str, Any], turn: int = 0, holder: str = ""
    ) -> CheckpointOrder:
        """Return what `state` is of. Whoever asks again has not heard that it is its turn."""
        return cls(loads, steps, turn, bytes.fromhex(holder) or None, _loads=True, _begun=True)

    def state(self) -> list[Any]:
        """Return what a scheduler that comes again has to know, as JSON can hold it."""
        turn = [self.turn, self._holder.hex()] if self.load and self._holder else []
        return [self.loads, dict(self.steps), *(turn if self._begun else ())]

    @property
    def load(self) -> int:
        """The turn of a load: all hold their pushes back. 0: nobody loads."""
        return self.turn if self._loads and self._holder is not None else 0

    def report(self, turn: int, worker: int, clocks: Mapping[str, int]) -> bool:
        """Take note that a worker holds its pushes back, and of the next step of each table.

        Return whether it is for the load that somebody waits for.
        """
        if turn == self.load:
            self._clocks[worker] = clocks
        return bool(turn) and turn == self.load and not self._begun

    def begin(self, workers: Collection[int]) -> list[Answer]:
        """Return what the process hears whose turn it is, where none of `workers` pushes."""
        pushes = self.load and not self._clocks.keys() >= set(workers)
        if self._holder is None or not self._request or pushes:
            return []
        self._begun = True
        body = self._about() | {"turn": self.turn, "clocks": [*self._clocks.items()]}
        return [Answer(self._holder, Message("turn", self._request, body=body))]

    def look(self, peers: Collection[bytes]) -> None:
        """End the turn of a process that is lost; `peers` are those that are there.

        An empty one is that of a member of which a scheduler that has come again will hear.
        """
        if self._holder not in peers and b"" not in peers:
            self._holder = None

    def ask(
        self, peer: bytes, request: int, body: Mapping[str, Any], peers: Collection[bytes], now: int
    ) -> dict[str, Any] | None:
        """Return what a worker hears for which another one has loaded; None: it is to wait.

        It may wait for its turn, which is `now`, a number that rises; see `begin`. `peers` are the
        processes that are there: the turn of one that is lost is over, as is that of one in whose
        place another one has come, which need not save or load.
        """
        self.look(peers)
        if self._holder not in (None, peer) or (self._holder, self._request) == (peer, request):
            return None  # Or it was sent again.
        if body["what"] == LOAD and (body["number"] <= self.loads or body["late"]):
            return self._about() | {"turn": 0}
        self._holder, self._request = peer, request
        self._loads, self._begun, self._clocks = body["what"] == LOAD, False, {}
        self.turn = max(now, self.turn + 1)
        return None

    def _about(self) -> dict[str, Any]:
        return {"loads": self.loads, "steps": dict(self.steps)}

    def is_over(self, turn: int) -> bool:
        """Return whether a turn is over; one that is not known is of another scheduler before."""
        return turn < self.turn or (turn == self.turn and self._holder is None)

    def end(self, turn: int, steps: Mapping[str, Any] | None) -> None:
        """Take note that a turn is over, with these `steps` of each table where it was a load."""
        if self.is_over(turn):
            return
        self.turn, self._holder = turn, None
        if steps is not None:
            self.loads += 1
            self.steps = dict(steps)
