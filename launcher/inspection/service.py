"""The socket at which `hvdlite-top` asks a running job, by messages over a link of this user.

ask NUMBER REQUEST ARGUMENTS ...    from the one who looks: see requests.py
answer NUMBER DICT                  from the launcher
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from hvdlite.common.base.errors import ConfigError, ProtocolError
from hvdlite.common.connections.frames import pack
from hvdlite.common.connections.link import Link
from hvdlite.common.connections.listener import Listener, Refusal
from hvdlite.common.connections.loop import Loop
from hvdlite.common.connections.prove import FIRST_OWN, Claim, Party
from hvdlite.launcher.inspection import runtime_folder
from hvdlite.launcher.inspection.asking import Answer, Ask

LAUNCHER, VIEWER = "launcher", "viewer"  # The ends of a connection.
# The kernel tells that the other end is of this user; there is nothing else to prove.
NO_SECRET = b"of this user"
ASK, ANSWER = "ask", "answer"
MOST_VIEWERS = 16
MOST_BYTES = 4096  # Of a request.
MOST_OPEN = 8  # Requests of one viewer that are not answered yet.
MOST_QUEUED = 1 << 24  # Bytes that a viewer has not read.
STRANGER_SECONDS = 5.0
TOUCH_SECONDS = 86400.0


class LocalService:
    """Serves `make`, the requests of one job; where it cannot listen, it is said by `say`."""

    def __init__(self, loop: Loop, make: Ask, say: Callable[[str], None]) -> None:
        self._loop, self._make = loop, make
        self._viewers: dict[Link, int] = {}  # With how many requests are open.
        self._path = ""
        self._listener: Listener | None = None
        try:
            self._listen()
        except (OSError, ConfigError) as error:  # No reason to end a training.
            say(f"hvdlite-top cannot look at this job: {error}")

    def _listen(self) -> None:
        listening, self._path = runtime_folder.publish()
        try:
            self._listener = Listener(
                self._loop, [listening], Party(NO_SECRET, LAUNCHER, VIEWER), self._accept,
                judge=self._judge, same_user=True, most_strangers=MOST_VIEWERS,
                stranger_seconds=STRANGER_SECONDS,
            )  # fmt: skip
        except BaseException:
            runtime_folder.withdraw(self._path)
            listening.close()
            raise
        self._loop.call_after(TOUCH_SECONDS, self._touch)

    def _touch(self) -> None:
        if self._listener is not None:
            # It counts as new: systemd-tmpfiles removes what is ten days old from /tmp.
            with contextlib.suppress(OSError):
                os.utime(self._path)
            self._loop.call_after(TOUCH_SECONDS, self._touch)

    def _judge(self, _claim: Claim) -> Refusal | None:
        if len(self._viewers) >= MOST_VIEWERS:
            return Refusal(FIRST_OWN, f"{MOST_VIEWERS} others look at this job already")
        return None

    def _accept(self, _claim: Claim, connection: socket.socket) -> None:
        link = Link(
            self._loop, connection, most_bytes=MOST_BYTES,
            received=lambda message, arrays: self._received(link, message),
            ended=lambda reason: self._forget(link),
        )  # fmt: skip
        self._viewers[link] = 0

    def _forget(self, link: Link) -> None:
        self._viewers.pop(link, None)

    def _received(self, link: Link, message: list[Any]) -> None:
        match message:
            case ["ask", int(number), *_] if self._viewers[link] >= MOST_OPEN:
                self._send(link, number, {"error": f"{MOST_OPEN} questions are open already"})
            case ["ask", int(number), *request]:
                self._viewers[link] += 1
                self._make(request, partial(self._answer, link, number))
            case _:
                raise ProtocolError("it asks what cannot be read")

    def _answer(self, link: Link, number: int, answer: Answer) -> None:
        if link not in self._viewers:
            return
        self._viewers[link] -= 1
        self._send(link, number, answer)

    def _send(self, link: Link, number: int, answer: Answer) -> None:
        if link.queued_bytes > MOST_QUEUED:
            self._forget(link)
            link.close()
            return
        try:
            head = pack((ANSWER, number, answer))
        except (ValueError, OverflowError, TypeError) as error:  # Of what a rank has answered.
            why = f"the answer cannot be sent: {type(error).__name__}"
            head = pack((ANSWER, number, {"error": why}))
        link.send_head(head)

    def close(self) -> None:
        """Serve no longer; idempotent."""
        if self._listener is not None:
            runtime_folder.withdraw(self._path)
            self._listener.close()
            self._listener = None
        for link in list(self._viewers):
            link.close()
        self._viewers.clear()
