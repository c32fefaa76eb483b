"""A connection of a worker: requests are sent again where no answer comes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hvdlite.ps.connections.channel import Caller
from hvdlite.ps.connections.messages import Message, ignore

SLOW_BYTES_PER_SECOND = 10e6  # On a slower network large messages may be sent twice.
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.1, 3.0
LONGEST_SLEEP_SECONDS = 60.0
LOOK_SECONDS = 0.02  # Between two looks at many requests that wait.


@dataclass
class _Sent:
    """A request that has no answer yet."""

    message: Message
    nbytes: int
    again_at: float
    wait: float


class Connection:
    """A connection with one server or the scheduler. Only the client's thread may use it."""

    def __init__(self, caller: Caller, now: Callable[[], float]) -> None:
        self.caller = caller
        self.receive: Callable[[Message], None] = ignore  # Gets each answer once.
        self.news: Callable[[Message], None] = ignore  # Gets what answers no request.
        self.heard = now()  # When the last message came.
        self.resent = 0
        self._now = now
        self._number = 0
        self._sent: dict[int, _Sent] = {}
        self._unanswered_bytes = 0  # Of what was sent.
        self._look_at = math.inf  # Before that, nothing is to be sent again.
        # The bytes of the last answer to such a request for a table.
        self._answer_bytes: dict[tuple[str, str], int] = {}
        # Last, as the thread of the caller may be connected already.
        caller.received, caller.connected = self.take, self.send_again

    def send(self, message: Message) -> int:
        """Send a request until it is answered; return its id."""
        self._number += 1
        message = Message(message.kind, self._number, *message[2:])
        # What is large is on its way for long, and sending it again would only delay it.
        nbytes = under_way = message.nbytes
        if self.caller.sharing is None:  # An answer comes behind all that is under way.
            nbytes += self._answer_bytes.get((message.kind, message.table), 0)
            nbytes += self._unanswered_bytes
        wait = FIRST_WAIT_SECONDS + nbytes / SLOW_BYTES_PER_SECOND
        self._sent[self._number] = sent = _Sent(message, under_way, self._now() + wait, wait)
        self._unanswered_bytes += under_way
        self._look_at = min(self._look_at, sent.again_at)
        self.caller.send(message)
        return self._number

    def forget(self) -> None:
        """Send nothing again that was sent so far."""
        self._sent.clear()
        self._unanswered_bytes, self._look_at = 0, math.inf

    def take(self, message: Message) -> None:
        self.heard = self._now()
        if not message.request:
            self.news(message)
        elif (sent := self._sent.pop(message.request, None)) is not None:
            self._unanswered_bytes -= sent.nbytes
            request = sent.message.kind, sent.message.table
            self._answer_bytes[request] = message.nbytes
            self.receive(message)

    def send_again(self) -> None:
        for sent in list(self._sent.values()):
            self.caller.send(sent.message)

    def look(self) -> float:
        """Send again what has waited for long; return when to look again.

        What is under way, or would be, is not sent twice; nor, for some seconds, what waits while
        others are answered.
        """
        now = self._now()
        if now < self._look_at:
            return min(self._look_at, now + LONGEST_SLEEP_SECONDS)
        takes = self.caller.takes  # Before the first of these is under way itself.
        is_heard = now - self.heard < FIRST_WAIT_SECONDS
        for sent in self._sent.values():
            if now >= sent.again_at:
                is_early = is_heard and sent.wait < LONGEST_WAIT_SECONDS
                sent.wait = max(sent.wait, min(2 * sent.wait, LONGEST_WAIT_SECONDS))
                sent.again_at = now + sent.wait
                if takes and not is_early:
                    self.caller.send(sent.message)
                    self.resent += 1
        first = min((sent.again_at for sent in self._sent.values()), default=math.inf)
        self._look_at = max(first, now + LOOK_SECONDS)
        return min(self._look_at, now + LONGEST_SLEEP_SECONDS)
