"""Operations on one table, begun one after another, and again where its servers are others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.ps.connections.messages import Message

Done = Callable[[Message | Exception], None]
Begin = Callable[[Done], object]


class MovedError(HorovodInternalError):
    """Other servers keep the table now: the request is to be made anew."""


class OrderedOperations:
    """Begins an operation when those before it have ended. Only the client's thread may use it.

    A push can be sent again until the next then. A pull follows at once, as what is sent later
    arrives later, or waits for the push.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Begin, Done, bool]] = deque()
        self._busy: list[bool] = []  # Of what is under way: whether it is a pull.
        self._begins = False  # `_next` runs: what ends at once must not run it inside.

    def push(self, begin: Begin, done: Done) -> None:
        """Run a push in its turn; `done` gets its result."""
        self._waiting.append((begin, done, False))
        self._next()

    def pull(self, begin: Begin, done: Done) -> None:
        """Run a pull in its turn, which may come while the push before it is under way."""
        self._waiting.append((begin, done, True))
        self._next()

    def drop_pulls(self, error: Exception) -> None:
        """Fail the pulls whose turn has not come, so that pushes behind them are sent at once."""
        pulls = [done for _, done, pulls in self._waiting if pulls]
        self._waiting = deque(each for each in self._waiting if not each[2])
        for done in pulls:
            done(error)

    def _next(self) -> None:
        if self._begins:
            return
        self._begins = True
        try:
            while self._waiting:
                begin, done, pulls = self._waiting[0]
                if self._busy and not (pulls and self._busy == [False]):
                    break
                self._waiting.popleft()
                self._busy.append(pulls)
                begin(partial(self._end, done, pulls))
        finally:
            self._begins = False

    def _end(self, done: Done, pulls: bool, result: Message | Exception) -> None:
        done(result)
        self._busy.remove(pulls)
        self._next()
