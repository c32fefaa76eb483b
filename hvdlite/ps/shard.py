"""A worker's view of one table on one server: what it has sent and pulled, and can send again.

A step is a push, then a pull with the next clock. Its push is kept until its pull is answered: a
server that is lost in between has perhaps lost the push, too.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.ps.messages import Buffer, Message


class PsRolledBack(HorovodInternalError):  # noqa: N818 - the name that users of other servers know
    """A server has lost steps that no worker can make good. Go on from the step `version`."""

    def __init__(self, message: str, version: int) -> None:
        super().__init__(message, job_goes_on=True)
        self.version = version


@dataclass
class _Request:
    message: Message
    done: Callable[[Message | Exception], None]


class Shard:
    """A table on a server. `send` sends a message under an id that it gives to it."""

    def __init__(
        self, table: str, server: int, worker: int, description: Mapping[str, Any],
        values: Callable[[], Sequence[Buffer]], send: Callable[[Message], int],
    ) -> None:  # fmt: skip
        self.table, self.server, self._worker = table, server, worker
        self.version = -1  # Of the last values that were pulled.
        self.clock = 0  # Of the next step.
        self._description = dict(description)
        self._first_values = values
        self._pulled: Sequence[Buffer] | None = None
        self._send = send
        self._started = False
        self._on_start: Callable[[Message | Exception], None] | None = None
        self._start_id = 0
        self._push: _Request | None = None
        self._pull: _Request | None = None
        self._ids: dict[int, str] = {}  # Of requests that are under way -> "push" or "pull".

    # -- what the worker asks for

    def start(self, done: Callable[[Message | Exception], None]) -> None:
        """Take part; `done` gets the clock at which this worker goes on."""
        self._on_start = done
        self._say_start()

    def push(
        self, body: Mapping[str, Any], payloads: Sequence[Buffer],
        done: Callable[[Message | Exception], None],
    ) -> None:  # fmt: skip
        """Push the gradients of the next step; `payloads` must not change until its pull ends."""
        message = Message("push", 0, self.table, self.clock, 0, body, payloads)
        self.clock += 1
        self._push = _Request(message, done)
        self._send_again("push")

    def pull(self, done: Callable[[Message | Exception], None]) -> None:
        """Pull the values that the next step needs."""
        self._pull = _Request(Message("pull", 0, self.table, self.clock), done)
        self._send_again("pull")

    def come_again(self) -> None:
        """Start anew at a server that has moved."""
        self._started = False
        self._say_start()

    def fail(self, error: Exception) -> None:
        """Fail all that waits for the server."""
        self._fail_all(error)

    # -- what the server answers

    def receive(self, message: Message) -> None:
        """Take an answer; one to a request that was answered is dropped."""
        kind = self._ids.pop(message.request, "")
        if not kind:
            return
        if kind == "start":
            self._receive_start(message)
        elif message.kind == "restarted":
            if self._started:
                self._started = False
                self._say_start()
        elif message.kind == "failed":
            self._end(kind, HorovodInternalError(self._words(message)))
        else:
            if message.kind == "values":
                self._pulled, self.version = message.payloads, message.clock
                if self._push is not None and self._push.message.clock < self.clock:
                    self._push = None
            self._end(kind, message)

    def _receive_start(self, message: Message) -> None:
        if message.kind == "wanted":
            values = self._first_values() if self._pulled is None else self._pulled
            self._note("start", Message("offer", 0, self.table, payloads=values))
        elif message.kind == "started":
            self._started = True
            first = self._on_start
            if first is not None:
                self._on_start = None
                self.clock = message.body["clock"]
                first(message)
            for word in ("push", "pull"):
                self._send_again(word)
        elif message.kind == "rolled_back":
            self._started = True
            why = (
                f"server {self.server} goes on from step {message.clock}, and this worker "
                f"has finished {self.clock}: no snapshot and no worker has what came between. Go "
                "on from that step"
            )
            self.clock = message.clock
            self._fail_all(PsRolledBack(why, message.clock))
        elif message.kind == "failed":
            self._fail_all(HorovodInternalError(self._words(message)))

    # -- parts

    def _say_start(self) -> None:
        body: dict[str, Any] = {
            "worker": self._worker, "table": self._description, "version": self.version,
        }  # fmt: skip
        if self._on_start is None:
            body["clock"] = self.clock if self._push is None else self._push.message.clock
        self._ids.clear()
        self._note("start", Message("start", 0, self.table, body=body))

    def _send_again(self, word: str) -> None:
        request = self._push if word == "push" else self._pull
        if request is not None and self._started:
            self._note(word, request.message)

    def _note(self, word: str, message: Message) -> None:
        self._ids[self._send(message)] = word

    def _end(self, word: str, result: Message | Exception) -> None:
        request = self._push if word == "push" else self._pull
        if word == "pull":
            self._pull = None
        if request is not None:
            done, request.done = request.done, _nothing
            done(result)

    def _fail_all(self, error: Exception) -> None:
        first, self._on_start = self._on_start, None
        if first is not None:
            first(error)
        for word in ("push", "pull"):
            self._end(word, error)
        self._push = None

    def _words(self, message: Message) -> str:
        return f"server {self.server}, table '{self.table}': {message.body.get('why', '?')}"


def _nothing(_result: Message | Exception) -> None:
    """Take no note of a result that is known."""
