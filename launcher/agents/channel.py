"""The channel between the launcher and the agent of a host: messages over two descriptors.

Neither end can hold up the other; whoever produces much looks at `queued_bytes` and waits, or lets
the channel fetch its messages one by one. An end that has nothing to say sends a beat now and then,
so that silence means a lost host.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.connections.frames import BEAT, pack
from hvdlite.common.connections.link import Link, Pipes
from hvdlite.common.connections.loop import Loop

VERSION = 5  # Of the messages; the agent names it in its first one.
# What the agent writes first: a shell there may have printed something before it.
PROLOGUE = b"\0hvdlite agent\n"
MOST_BYTES = 1 << 26  # Of one message.
PART_BYTES = 1 << 18  # Of a file, which is sent in parts.
MUCH_BYTES = 1 << 22  # So much in the queue means that the other end does not keep up.
BEATS = 5  # So many beats go into the time after which silence is a loss.


def squeeze(message: Sequence[Any]) -> bytes:
    """Return a message as a head, compressed: what many hosts are told is made once for all."""
    return zlib.compress(pack(message), 1)


def unsqueeze(data: bytes | bytearray | memoryview) -> bytes:
    """Return the head of a message that was squeezed."""
    return zlib.decompress(data)


def _memory(_message: Any, sizes: list[int]) -> list[bytearray]:
    if sum(sizes) > MOST_BYTES:
        raise ProtocolError(f"it sent {sum(sizes)} bytes beside a message")
    return [bytearray(size) for size in sizes]


class Channel:
    """One end. `received` gets kind and fields of each message; `ended` is called once.

    The file descriptors are the channel's from now on.
    """

    def __init__(
        self, loop: Loop, read_fd: int, write_fd: int, *,
        received: Callable[[str, list[Any]], None], ended: Callable[[], None],
        prologue: bytes = b"",
    ) -> None:  # fmt: skip
        self._loop = loop
        self._link = Link(
            loop, Pipes(read_fd, write_fd), most_bytes=MOST_BYTES, prologue=prologue,
            received=lambda message, arrays: received(message[0], [*message[1:], *arrays]),
            memory=_memory,
            ended=lambda _: ended(),
        )  # fmt: skip
        # Send a message, or bytes that are none, now or when the other end can take them.
        self.send, self.send_raw = self._link.send, self._link.send_bytes
        # Say no more once all is sent; and close both directions at once.
        self.close_writing, self.close = self._link.finish, self._link.close

    def send_data(self, kind: str, *fields: Any, data: bytes) -> None:
        """Send a message whose last field is `data`, which is not copied: many may be sent it."""
        self._link.send_head(pack((kind, *fields)), [data])

    @property
    def open(self) -> bool:
        """Whether the other end may still say something."""
        return self._link.open

    @property
    def queued_bytes(self) -> int:
        """How much the other end has not taken yet."""
        return self._link.queued_bytes

    def feed(self, messages: Iterator[tuple[Any, ...]], fed: Callable[[], None]) -> None:
        """Send messages, each only when the one before it has gone; call `fed` after the last.

        What else is sent meanwhile comes between them.
        """

        def send_next() -> None:
            if not self._link.says:
                return
            message = next(messages, None)
            if message is None:
                fed()
            else:
                self._link.send_head(pack(message), sent=send_next)

        self._loop.post(send_next)

    def beat(self, now: float, silence_seconds: float) -> bool:
        """Send a beat where one is due; return whether the other end has been heard in time."""
        link = self._link
        if now - link.spoke_at >= silence_seconds / BEATS and not link.queued_bytes:
            link.send_bytes(BEAT)
        # What waits to be read says that it is we who were busy elsewhere.
        return link.silent_for() < silence_seconds or link.has_input()
