"""The connections of a worker: a thread that sends requests, again where no answer comes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdlite.common.base.errors import ProtocolError
from hvdlite.ps.channel import Caller, new_context, poll
from hvdlite.ps.messages import Message

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.1, 3.0


@dataclass
class _Sent:
    """A request that has no answer yet."""

    message: Message
    again_at: float
    wait: float


class Connection:
    """A connection with one server or the scheduler. Only the client's thread may use it."""

    def __init__(self, caller: Caller, now: Callable[[], float] = time.monotonic) -> None:
        self.caller = caller
        self.receive: Callable[[Message], None] = lambda _message: None  # Gets each answer once.
        self.resent = 0
        self._now = now
        self._number = 0
        self._sent: dict[int, _Sent] = {}

    def send(self, message: Message) -> int:
        """Send a request until it is answered; return its id."""
        self._number += 1
        message = message._replace(request=self._number)
        wait = FIRST_WAIT_SECONDS
        self._sent[self._number] = _Sent(message, self._now() + wait, wait)
        self.caller.send(message)
        return self._number

    def forget(self) -> None:
        """Send nothing again that was sent so far."""
        self._sent.clear()

    def read(self) -> None:
        """Take the answers that are here."""
        for message in self.caller.received():
            if self._sent.pop(message.request, None) is not None:
                self.receive(message)

    def look(self) -> float:
        """Send again what has waited for long; return when to look again."""
        now = self._now()
        for sent in self._sent.values():
            if now >= sent.again_at:
                sent.wait = min(2 * sent.wait, LONGEST_WAIT_SECONDS)
                sent.again_at = now + sent.wait
                self.caller.send(sent.message)
                self.resent += 1
        return min((sent.again_at for sent in self._sent.values()), default=now + 60.0)


class Client:
    """A thread with connections. What is given to `call` runs in it."""

    def __init__(self, addresses: Sequence[str], identity: bytes) -> None:
        self._context = new_context()
        self.connections = [
            Connection(Caller(self._context, address, identity)) for address in addresses
        ]
        self._calls: deque[Callable[[], object]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="hvdlite ps", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], object]) -> None:
        """Run a function in the thread soon; it must neither wait nor raise."""
        self._calls.append(function)
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """End the thread and the connections."""
        if not self._closed:
            self._closed = True
            self.call(lambda: None)
            self._thread.join()
            os.close(self._wake_fd)

    def _run(self) -> None:
        by_caller = {connection.caller: connection for connection in self.connections}
        while not self._closed:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            while self._calls:
                self._calls.popleft()()
            due = min((connection.look() for connection in self.connections), default=None)
            seconds = 60.0 if due is None else max(0.0, due - time.monotonic())
            for caller in poll(by_caller, self._wake_fd, seconds):
                with contextlib.suppress(ProtocolError):
                    by_caller[caller].read()
        for caller in by_caller:
            caller.close()
        self._context.term()
