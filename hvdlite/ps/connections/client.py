"""The connections of a worker, and the thread that uses them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.connections.loop import Loop
from hvdlite.common.requests.handles import Handle
from hvdlite.common.settings.logs import log
from hvdlite.ps.connections import system
from hvdlite.ps.connections.channel import Caller
from hvdlite.ps.connections.connection import Connection
from hvdlite.ps.connections.encryption import Encryption
from hvdlite.ps.connections.messages import Message, ignore
from hvdlite.ps.connections.records import OFF
from hvdlite.ps.connections.shared_memory import SharedMemory, is_here
from hvdlite.ps.layouts.blocks import Array

CLOSED = "this process has left its parameter servers: its connections are closed"

# Of the name that a user gives to a process, and of that of its host, in characters.
MOST_WORDS, MOST_HOST = 48, 64

# How long a call waits for others: only one thread runs at a time, and each turn costs.
GATHER_SECONDS = 0.0005

_Call = Callable[[], object]
_Ask = Callable[[Callable[[Message | Exception], None]], object]
# What is asked, and what makes the result of a list of answers; it must neither wait nor raise.
Plan = tuple[Sequence[_Ask], Callable[[list[Any]], Any]]


def name_of(role: str, words: str) -> bytes:
    """Return a name for this process that no other one has.

    Its first word is the role, and the last but one says for people which process it is.
    """
    process = f"{os.getpid()}@{socket.gethostname()[:MOST_HOST]}"
    return f"{role} {words[:MOST_WORDS]} {process} {system.random_bytes(16).hex()}".encode()


class Client:
    """A thread with connections. What is given to `call` runs in it.

    Others know this process as `identity`, whose first word is its role.
    """

    def __init__(self, identity: bytes, token: bytes = b"", *, encrypted: bool = False) -> None:
        self._loop = Loop()
        self.now = self._loop.awake_seconds
        self._identity, self._token = identity, token
        self._encryption = Encryption(token) if encrypted else None
        # Is replaced, never changed: the thread may go through it while another one connects.
        self._connections: Sequence[Connection] = ()
        self._calls: deque[tuple[_Call, _Call]] = deque()
        self._woken = False  # It will look for calls before it sleeps.
        self._gathers = self._hurried = False  # It waits for more calls; it must not.
        self._works = True  # Something has come since it slept, and not the time of a timer alone.
        self._ended = False  # The thread takes no calls any more.
        self._timers: list[_Timer] = []
        self._lock = threading.RLock()  # Guards the end: a loop that is closed is not woken.
        self._closed = False
        self.pending: set[Handle] = set()  # Of `ask`. Only the thread changes it.
        self.failure: Exception | None = None  # What has ended the work of the thread.
        self.on_failure: Callable[[Exception], object] = ignore
        self.records = OFF  # Of the pushes and pulls that this thread makes.
        self.memory: SharedMemory | None = None
        with contextlib.suppress(OSError):
            self.memory = SharedMemory()
        self._thread = system.Thread(target=self._run, name="hvdlite ps", daemon=True)
        self._thread.start()

    def connect(
        self, address: str, role: str, refused: Callable[[Exception], None] = ignore
    ) -> Connection:
        """Return a new connection with a process of this role, and call `refused` where it says no.

        It is called in the thread, or before that has anything to do, which may be refused then
        before this returns.

        An `address` may have a second word, the name of a Unix socket of that host.
        """
        address, _, name = address.partition(" ")
        near = bool(name) and self.memory is not None and is_here(name)
        caller = Caller(
            self._loop, f"@{name}" if near else address, role, self._identity, self._token,
            encryption=self._encryption, memory=self.memory if near else None, far=address,
            refused=refused,
        )  # fmt: skip
        connection = Connection(caller, self.now)
        self._connections = (*self._connections, connection)
        return connection

    def new(self, size: int, dtype: np.dtype[Any]) -> Array:
        """Return an array that is not initialized, in memory that servers of this host see."""
        return np.empty(size, dtype) if self.memory is None else self.memory.new(size, dtype)

    def disconnect(self, connection: Connection) -> None:
        self._connections = [each for each in self._connections if each is not connection]
        connection.caller.close()

    def every(self, seconds: float, function: Callable[[], object]) -> None:
        """Call a function in the thread again and again, first after `seconds`."""
        self.call(lambda: self._timers.append(_Timer(seconds, function, self.now)))

    def ask(self, function: _Ask) -> Handle:
        """Run a function in the thread that calls what it is given with a result, or an error.

        What has no result when the client is closed, or is asked later, fails.
        """
        return self.ask_all([function], lambda results: results[0])

    def ask_all(
        self, functions: Sequence[_Ask], finish: Callable[[list[Any]], Any] = ignore,
        again: Callable[[Exception], Plan | None] = ignore,
    ) -> Handle:  # fmt: skip
        """Do as `ask` for each function; nothing else happens in the thread between them.

        When all have ended, the handle has what `finish` makes of their results, or the first
        error, unless `again` says what to ask instead.
        """
        asked = _Asked(self, functions, finish, again)
        self.call(asked.begin, asked.refuse)
        return asked.handle

    def call(self, function: _Call, otherwise: _Call = ignore) -> None:
        """Run a function in the thread soon, or `otherwise` where the client is closed before.

        Neither may wait or raise.
        """
        self._calls.append((function, otherwise))
        if self._ended:  # Looked at after the append: either the thread or this one finds it.
            self._refuse_calls()
        elif not self._woken:  # Likewise: it says that it sleeps, and then looks for calls.
            with self._lock:
                if not self._ended:
                    self._woken = True
                    self._loop.wake()

    def hurry(self) -> None:
        """Let the thread make at once the calls that are here: somebody waits for one of them."""
        if self._calls:
            self._hurried = True
            if self._gathers:  # Looked at afterwards: the thread does it the other way round.
                with self._lock:
                    if not self._ended:
                        self._loop.wake()

    def attend(self, handle: Handle) -> None:
        """See `hurry`."""
        self.hurry()

    def _refuse_calls(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._calls.popleft()[1]()

    def close(self) -> None:
        """End the thread and the connections; what waits for an answer fails."""
        if not self._closed:
            self._closed = True
            self.call(lambda: None)
            self.hurry()
            self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            try:
                self._look()
            except Exception as error:
                # Nobody could answer what waits any more. The thread goes on, so that this process
                # can still leave its cluster.
                log.error("the parameter server's client has failed", exc_info=error)
                failure = HorovodInternalError(
                    f"the thread of this process that talks with servers has failed: {error!r}"
                )
                failure.__cause__ = error
                self._end_all(failure)
        with self._lock:
            self._ended = True
        self._refuse_calls()
        self._end_all(HorovodInternalError(CLOSED))
        for connection in self._connections:
            connection.caller.close()
        self._loop.close()
        if self.memory is not None:
            self.memory.close()

    def _look(self) -> None:
        hurried, self._hurried = self._hurried, False
        works = self._works or bool(self._calls)
        while self._calls:
            self._calls.popleft()[0]()
        if self._closed:
            return
        times = [connection.look() for connection in self._connections]
        times += [timer.look() for timer in self._timers]
        seconds = max(0.0, min(times) - self.now()) if times else 60.0
        for connection in self._connections:
            connection.caller.flush()
        # After a hurried call whoever could make others waits for its answer.
        if hurried or not works or not self._gather(seconds):
            self._woken = False
            self._works = self._loop.run_once(0.0 if self._calls else seconds)
            self._woken = True
        else:
            self._works = True

    def _gather(self, seconds: float) -> bool:
        """Sleep for so short a time that calls need not end it; return whether there was work."""
        self._gathers = True
        works = self._hurried or self._loop.run_once(min(seconds, GATHER_SECONDS))
        self._gathers = False
        return works or bool(self._calls)

    def _end_all(self, failure: Exception) -> None:
        """Let all that waits, and all that comes, fail with the first of such errors."""
        if self.failure is not None:
            return
        self.failure = failure
        for handle in [*self.pending]:
            self.pending.discard(handle)
            if not handle.poll():
                handle.fail(failure)
        with contextlib.suppress(Exception):  # Its tables may be what has failed.
            self.on_failure(failure)


class _Asked:
    """What was asked, and the handle of its result."""

    __slots__ = ("_again", "_client", "_finish", "_functions", "_missing", "_results", "handle")

    def __init__(
        self, client: Client, functions: Sequence[_Ask], finish: Callable[[list[Any]], Any],
        again: Callable[[Exception], Plan | None],
    ) -> None:  # fmt: skip
        self.handle = Handle()
        self.handle.queue = client
        self._client, self._again = client, again
        self._functions, self._finish = functions, finish
        self._missing = 0
        self._results: list[Message | Exception | None] = []

    def begin(self) -> None:
        """Ask, in the thread."""
        client, functions = self._client, self._functions
        client.pending.add(self.handle)
        self._missing = len(functions)
        self._results = [None] * self._missing
        for number, function in enumerate(functions):
            done = partial(self._end, number)
            if client.failure is None:
                function(done)
            else:
                done(client.failure)

    def refuse(self) -> None:
        """Fail, as the client is closed."""
        self.handle.fail(HorovodInternalError(CLOSED))

    def _end(self, number: int, result: Message | Exception) -> None:
        self._results[number] = result
        self._missing -= 1
        if self._missing or self.handle.poll():
            return
        errors = [each for each in self._results if isinstance(each, Exception)]
        if errors and (plan := self._again(errors[0])) is not None:
            self._functions, self._finish = plan
            self.begin()
            return
        self._client.pending.discard(self.handle)
        if errors:
            self.handle.fail(errors[0])
        else:
            self.handle.complete(self._finish(self._results))


class _Timer:
    def __init__(
        self, seconds: float, function: Callable[[], object], now: Callable[[], float]
    ) -> None:
        self._seconds, self._function, self._now = seconds, function, now
        self._at = now() + seconds

    def look(self) -> float:
        """Call the function if it is time; return when it will be."""
        now = self._now()
        if now >= self._at:
            self._at = now + self._seconds
            self._function()
        return self._at
