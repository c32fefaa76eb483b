"""The connections of a worker: a thread that sends requests, again where no answer comes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.plain.handles import Handle
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
        self.receive: Callable[[Message], None] = _ignore  # Gets each answer once.
        self.news: Callable[[Message], None] = _ignore  # Gets what answers no request.
        self.heard = now()  # When the last message came.
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
            self.heard = self._now()
            if not message.request:
                self.news(message)
            elif self._sent.pop(message.request, None) is not None:
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
    """A thread with connections. What is given to `call` runs in it.

    With `curve_token`, what it sends is encrypted.
    """

    def __init__(self, identity: bytes, curve_token: bytes | None = None) -> None:
        self._context = new_context(curve_token)
        self._identity = identity
        self._connections: dict[Caller, Connection] = {}
        self._calls: deque[Callable[[], object]] = deque()
        self._timers: list[_Timer] = []
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="hvdlite ps", daemon=True)
        self._thread.start()

    def connect(self, address: str) -> Connection:
        """Return a new connection, in the thread or before it has anything to do."""
        caller = Caller(self._context, address, self._identity)
        self._connections[caller] = connection = Connection(caller)
        return connection

    def disconnect(self, connection: Connection) -> None:
        """End a connection, in the thread."""
        del self._connections[connection.caller]
        connection.caller.close()

    def every(self, seconds: float, function: Callable[[], object]) -> None:
        """Call a function in the thread again and again, first after `seconds`."""
        self.call(lambda: self._timers.append(_Timer(seconds, function)))

    def ask(self, function: Callable[[Callable[[Message | Exception], None]], object]) -> Handle:
        """Run a function in the thread that calls what it is given with a result, or an error."""
        handle = Handle()

        def done(result: Message | Exception) -> None:
            if isinstance(result, Exception):
                handle.fail(result)
            else:
                handle.complete(result)

        self.call(lambda: function(done))
        return handle

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
        while not self._closed:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            while self._calls:
                self._calls.popleft()()
            times = [connection.look() for connection in self._connections.values()]
            times += [timer.look() for timer in self._timers]
            seconds = max(0.0, min(times, default=0.0) - time.monotonic()) if times else 60.0
            for caller in poll(self._connections, self._wake_fd, seconds):
                with contextlib.suppress(ProtocolError):
                    self._connections[caller].read()
        for caller in self._connections:
            caller.close()
        self._context.term()


def _ignore(_message: Message) -> None:
    """Take no note of a message."""


class _Timer:
    def __init__(self, seconds: float, function: Callable[[], object]) -> None:
        self._seconds, self._function = seconds, function
        self._at = time.monotonic() + seconds

    def look(self) -> float:
        """Call the function if it is time; return when it will be."""
        now = time.monotonic()
        if now >= self._at:
            self._at = now + self._seconds
            self._function()
        return self._at
