"""Peers of a cluster that say what a test wants, and wait in the thread of the test."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hvdlite.common.connections.loop import Loop
from hvdlite.ps.connections.channel import Caller
from hvdlite.ps.connections.messages import Message
from tests.limits import patient

LIMIT_SECONDS = patient(30.0)
TOKEN = b"a secret"


def break_off(caller: Caller) -> None:
    """End the present connection of a caller in its thread, as a network may."""
    assert caller._outbox is not None
    caller._outbox.link.close()
    caller._lose("it was broken off")


class Peer:
    """One that connects with a process of this `role`, and proves that it knows the token."""

    def __init__(
        self, address: str, role: str, name: bytes = b"worker of a test", token: bytes = TOKEN
    ) -> None:
        self.loop = Loop()
        self.heard: deque[Message] = deque()
        self.refused: list[Exception] = []
        self.caller = Caller(self.loop, address.partition(" ")[0], role, name, token)
        self.caller.received, self.caller.refused = self.heard.append, self.refused.append

    def wait(self, holds: Callable[[], bool]) -> None:
        """Run until something holds."""
        limit = time.monotonic() + LIMIT_SECONDS
        while not holds():
            assert time.monotonic() < limit, self.caller.trouble
            self.caller.flush()
            self.loop.run_once(0.05)

    def say(self, *words: Any) -> None:
        """Send a message."""
        self.wait(lambda: self.caller.takes)
        self.caller.send(Message(*words))

    def say_raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.wait(lambda: self.caller.takes)
        assert self.caller._outbox is not None
        self.caller._outbox.link.send_bytes(data)
        self.caller.flush()

    def hear(self) -> Message:
        """Return the next message."""
        self.wait(lambda: bool(self.heard))
        return self.heard.popleft()

    def ask(self, *words: Any) -> Message:
        """Return the answer to a message."""
        self.say(*words)
        return self.hear()

    def close(self) -> None:
        """End the connection."""
        self.caller.close()
        self.loop.close()
