"""Whose turn it is to save or load: the scheduler lets one worker after another do it.

All workers call `ps.load`, and the first one does it for all: the second call of a worker is the
second load of the job. A worker that comes when others have made steps loads nothing any more.

A load undoes what was pushed before it, on all servers or on none of them: it begins when each
worker holds its pushes back, and has said at which step it stands, as in a change of the number
of servers (see `Change`). Of these there is none meanwhile. When all servers have read what they
are to have, the worker that leads tells the scheduler. From then on the load counts: all servers
hear of it with the news, and make it, whatever becomes of that worker. A server that comes again
reads it anew. The load is over when all of them stand at it.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdlite.ps.connections.messages import Answer, Message

SAVE, LOAD = "save", "load"


@dataclass
class CheckpointOrder:
    """The turns. `steps` are those before the steps that tables count, since the last load."""

    loads: int = 0  # How many the job has made.
    steps: Mapping[str, Any] = field(default_factory=dict)
    loaded: Mapping[str, int] = field(default_factory=dict)  # Tables -> the turns of their loads.
    turn: int = 0
    decided: Mapping[str, Any] | None = None  # The load that counts, and is not over yet.
    _holder: bytes | None = None  # The process that saves or loads.
    _request: int = 0  # With which it has asked.
    _loads: bool = False  # Whether it loads, and not saves.
    _begun: bool = False  # Whether it has heard that it is its turn.
    # Of a load: workers that hold their pushes back -> the next step of each table.
    _clocks: dict[int, Mapping[str, int]] = field(default_factory=dict)
    # Processes that wait for their turns -> their requests, and what they say.
    _waiting: dict[bytes, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)

    @classmethod
    def again(
        cls, loads: int, steps: Mapping[str, Any], loaded: Mapping[str, int], turn: int = 0,
        holder: str = "", decided: Mapping[str, Any] | None = None,
    ) -> CheckpointOrder:  # fmt: skip
        """Return what `state` is of. Whoever asks again has not heard that it is its turn."""
        process = bytes.fromhex(holder) or None
        return cls(loads, steps, loaded, turn, decided, process, _loads=True, _begun=True)

    def state(self) -> list[Any]:
        """Return what a scheduler that comes again has to know, as JSON can hold it."""
        turn = [self.turn, self._holder.hex(), self.decided] if self.load and self._holder else []
        counts = self._begun or self.decided is not None
        return [self.loads, self.steps, self.loaded, *(turn if counts else ())]

    @property
    def load(self) -> int:
        """The turn of a load: all hold their pushes back. 0: nobody loads."""
        return self.turn if self._loads and self._holder is not None else 0

    @property
    def is_idle(self) -> bool:
        """Whether nobody saves or loads, or waits for that."""
        return self._holder is None and not self._waiting

    def ask(self, peer: bytes, request: int, body: Mapping[str, Any]) -> None:
        """Take note that a process waits for its turn, or has not heard that it is."""
        if (self._holder, self._request) == (peer, request):
            self._begun = False
        else:
            self._waiting[peer] = request, body

    def report(self, turn: int, worker: int, clocks: Mapping[str, int]) -> None:
        """Take note that a worker holds its pushes back, and of the next step of each table."""
        if turn == self.load:
            self._clocks[worker] = clocks

    def go_on(self, peers: Collection[bytes], workers: Collection[int], now: int) -> list[Answer]:
        """Return what those hear whose turn it is, and those for which another one has loaded.

        `peers` are the processes that are there: the turn of one that is lost is over, as is that
        of one in whose place another one has come, which need not save or load. An empty one is
        that of a member of which a scheduler that has come again will hear. A turn is `now`, a
        number that rises; a load begins where none of `workers` pushes.
        """
        if b"" not in peers:
            self._waiting = {peer: each for peer, each in self._waiting.items() if peer in peers}
        is_there = self._holder not in self._waiting and {self._holder, b""} & {*peers}
        if not is_there and self.decided is None:
            self._holder = None
        answers = []
        while self._holder is None and self._waiting:
            peer = next(iter(self._waiting))
            request, body = self._waiting.pop(peer)
            loads = body["what"] == LOAD
            if loads and (body["number"] <= self.loads or body["late"]):
                answers.append(self._answer(peer, request, turn=0))
                continue
            self._holder, self._request, self.turn = peer, request, max(now, self.turn + 1)
            self._loads, self._begun, self._clocks = loads, False, {}
        is_quiet = not self.load or self._clocks.keys() >= set(workers)
        if self._holder is not None and not self._begun and is_quiet:
            self._begun, clocks = True, [*self._clocks.items()]
            answers.append(self._answer(self._holder, self._request, turn=self.turn, clocks=clocks))
        return answers

    def _answer(self, peer: bytes, request: int, **body: Any) -> Answer:
        body |= {"loads": self.loads, "steps": dict(self.steps)}
        return Answer(peer, Message("turn", request, body=body))

    def end(self, turn: int, load: Mapping[str, Any] | None) -> bool:
        """Take note that a turn is over, or, with a `load`, that this one counts from now on.

        Return whether it is over. One that is not known is that of another scheduler before, as
        which nobody has begun to load.
        """
        if self._holder is None or turn != self.turn:
            return True
        if self.decided is None:
            self.decided = load
        if self.decided is None:
            self._holder = None
        return self._holder is None

    def look(self, stands: Collection[int]) -> bool:
        """Return whether the load that counts is over; `stands`: the last ones of servers."""
        if self.decided is None or min(stands) < self.turn:
            return False
        self.loads, self.steps = self.loads + 1, self.decided["steps"]
        self.loaded = {**self.loaded, **dict.fromkeys(self.decided["clocks"], self.turn)}
        self.decided, self._holder = None, None
        return True
