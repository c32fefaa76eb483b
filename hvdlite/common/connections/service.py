"""A service that answers requests in a thread of its own, and the clients that ask it.

    client                                 service
    ask NUMBER METHOD ARGUMENTS ...  ->
                                     <-    answer NUMBER ERROR RESULT

Answers come in any order: some wait for something to happen. ERROR is the name of an exception,
whose text is the result then, and empty where there is none.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.connections.address import Address
from hvdlite.common.connections.dial import Failure, Limits, reach
from hvdlite.common.connections.frames import pack
from hvdlite.common.connections.link import Link
from hvdlite.common.connections.listener import STRANGER_SECONDS, Listener
from hvdlite.common.connections.liveness import Liveness
from hvdlite.common.connections.loop import Loop, Timer, lasting
from hvdlite.common.connections.prove import Claim, Party

ASK, ANSWER = "ask", "answer"
DEAD_SECONDS = 30.0  # After which a host that does not answer any more counts as gone.
LIMITS = Limits(connect_seconds=5.0, prove_seconds=30.0)  # The process that serves may be busy.
LONGEST_SECONDS = 86400.0 * 20  # The kernel sleeps for 24 days at most; a longer wait has no limit.
ERRORS: dict[str, type[Exception]] = {
    each.__name__: each for each in (IndexError, TimeoutError, ValueError)
}

log = logging.getLogger("hvdlite")


class Wait(NamedTuple):
    """What a method returns whose result is not there yet.

    ``result(True)`` gives it, or raises, once `ready` holds, and ``result(False)`` after `seconds`.
    """

    ready: Callable[[], bool]
    result: Callable[[bool], Any]
    seconds: float | None = None  # None: without a limit.


class _Waiting:
    def __init__(self, link: Link, number: int, wait: Wait) -> None:
        self.link, self.number, self.wait = link, number, wait
        self.timer: Timer | None = None


class Service:
    """Answers by `methods` until `close`; these are called in its thread, and must not sleep.

    It closes `sockets`. A method that has changed something calls `look`.
    """

    def __init__(
        self, name: str, sockets: Sequence[socket.socket], party: Party,
        methods: Mapping[str, Callable[..., Any]], most_bytes: int,
    ) -> None:  # fmt: skip
        self._methods, self._most_bytes = methods, most_bytes
        self._loop = Loop()
        self._liveness = Liveness(self._loop, DEAD_SECONDS)
        self._links: set[Link] = set()
        self._waiting: dict[_Waiting, None] = {}  # In the order in which they came.
        self._over = False
        self._listener = Listener(
            self._loop, sockets, party, self._accept, stranger_seconds=STRANGER_SECONDS
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        lasting.add(self)
        self._thread.start()

    def look(self) -> None:
        """Answer those for whom all is ready."""
        for waiting in list(self._waiting):
            if waiting.wait.ready():
                self._end_wait(waiting, found=True)

    def post(self, function: Callable[[], object]) -> None:
        """Call `function` in the thread, from another one."""
        self._loop.post(function)

    def close(self) -> None:
        """Close all connections, by which clients learn of the end, and end the thread."""
        lasting.discard(self)
        self._over = True
        self._loop.wake()
        self._thread.join()
        self._loop.close()

    def after_fork_in_child(self) -> None:
        """Close this process's copies of all descriptors."""
        self._loop.close()
        self._listener.close()
        for link in self._links:
            link.close_after_fork()

    # -- the thread

    def _run(self) -> None:
        while not self._over:
            self._loop.run_once()
        self._listener.close()
        for link in self._links:
            link.close()

    def _accept(self, claim: Claim, connection: socket.socket) -> None:
        def ended(reason: str) -> None:
            if link.at_fault:
                log.warning("the connection of a %s is closed: %s", claim.role, reason)
            self._links.discard(link)
            for waiting in [each for each in self._waiting if each.link is link]:
                self._forget(waiting)

        self._liveness.prepare(connection)
        link = Link(
            self._loop, connection, received=lambda message, arrays: self._obey(link, message),
            ended=ended, most_bytes=self._most_bytes, liveness=self._liveness,
        )  # fmt: skip
        self._links.add(link)

    def _obey(self, link: Link, message: list[Any]) -> None:
        match message:
            case ["ask", int(number), str(method), *arguments] if method in self._methods:
                self._answer(link, number, lambda: self._methods[method](*arguments))
            case _:
                raise ProtocolError(f"it sent {str(message)[:80]}")

    def _answer(self, link: Link, number: int, make: Callable[[], Any]) -> None:
        """Send what `make` returns or raises, unless that has to wait."""
        try:
            result = make()
            if isinstance(result, Wait):
                if not result.ready():
                    self._defer(link, number, result)
                    return
                result = result.result(True)
            head = pack((ANSWER, number, "", result))
        except Exception as error:  # What a client asks must not end the service of the others.
            head = pack((ANSWER, number, type(error).__name__, str(error)))
        link.send_head(head)

    def _defer(self, link: Link, number: int, wait: Wait) -> None:
        waiting = _Waiting(link, number, wait)
        if wait.seconds is not None and wait.seconds < LONGEST_SECONDS:
            waiting.timer = self._loop.call_after(
                wait.seconds, lambda: self._end_wait(waiting, found=False)
            )
        self._waiting[waiting] = None

    def _end_wait(self, waiting: _Waiting, *, found: bool) -> None:
        self._forget(waiting)
        self._answer(waiting.link, waiting.number, lambda: waiting.wait.result(found))

    def _forget(self, waiting: _Waiting) -> None:
        del self._waiting[waiting]
        if waiting.timer is not None:
            waiting.timer.cancel()


class Client:
    """Asks the service at one of `addresses`, in any number of threads at a time.

    It has no thread: one of those that wait for an answer drives the loop for all. Raises
    `ConnectionError` with what was tried.
    """

    def __init__(self, addresses: Sequence[Address], party: Party, most_bytes: int) -> None:
        def failed(failures: list[Failure]) -> None:
            raise ConnectionError("; ".join(map(str, failures)) or "no address")

        self._service = party.other
        self._numbers = itertools.count()
        self._changed = threading.Condition()  # Guards the next three; tells of `_driven`.
        self._driven = False  # Whether a thread runs the loop.
        self._closed = False
        self._answers: dict[int, tuple[str, Any] | None] = {}  # Of all who wait.
        self._loop = Loop()
        try:
            connection = reach(self._loop, addresses, party, b"", lambda: LIMITS, failed)
            liveness = Liveness(self._loop, DEAD_SECONDS)
            liveness.prepare(connection)
        except BaseException:
            self._loop.close()
            raise
        self._link = Link(
            self._loop, connection, received=lambda message, arrays: self._take(message),
            ended=lambda reason: None, most_bytes=most_bytes, liveness=liveness,
        )  # fmt: skip
        lasting.add(self)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method, or raise its error.

        Raises `ConnectionError` where the service has ended, or this client is closed.
        """
        with self._changed:
            number = next(self._numbers)
            self._answers[number] = None
            try:
                self._link.send(ASK, number, method, *arguments)
                while self._answers[number] is None and self._link.open and not self._closed:
                    if self._driven:
                        self._changed.wait()
                    else:
                        self._drive()
            finally:
                answer = self._answers.pop(number)
        if answer is None:
            raise ConnectionError(f"the {self._service} has ended during {method}")
        error, result = answer
        if error:
            raise ERRORS.get(error, RuntimeError)(result)
        return result

    def _drive(self) -> None:
        """Run the loop for a turn, without the lock: others may ask meanwhile."""
        self._driven = True
        self._changed.release()
        try:
            self._loop.run_once()
        finally:
            self._changed.acquire()
            self._driven = False
            self._changed.notify_all()

    def _take(self, message: list[Any]) -> None:
        match message:
            case ["answer", int(number), str(error), result]:
                if number in self._answers:  # Or a signal has interrupted the one who waited.
                    self._answers[number] = error, result
            case _:
                raise ProtocolError(f"the {self._service} sent {str(message)[:80]}")

    def close(self) -> None:
        """Close the connection; those who wait for an answer hear of it. Idempotent."""
        lasting.discard(self)
        with self._changed:
            self._closed = True
            self._loop.wake()
            self._changed.wait_for(lambda: not self._driven)
            self._link.close()
            self._loop.close()

    def after_fork_in_child(self) -> None:
        """Close this process's copies of all descriptors; other threads may have held the lock."""
        self._changed, self._driven, self._closed = threading.Condition(), False, True
        self._link.close_after_fork()
        self._loop.close()
