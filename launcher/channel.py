"""The channel between the launcher and the agent of a host: messages over two descriptors.

A message is a kind and its fields: a msgpack list behind its length. Both ends write without
blocking, so neither can hold up the other; whoever produces much looks at `queued_bytes` and waits,
or lets the channel fetch its messages one by one.
An end that has nothing to say sends a beat now and then, so that silence means a lost host.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgpack

from hvdlite.launcher.event_loop import EventLoop

VERSION = 1  # Of the messages; the agent names it in its first one.
# What the agent writes first: a shell there may have printed something before it.
PROLOGUE = b"\0hvdlite agent\n"
LENGTH = struct.Struct(">I")
MOST_BYTES = 1 << 26  # Of one message.
READ_BYTES = 1 << 16
PART_BYTES = 1 << 18  # Of a file, which is sent in parts.
MUCH_BYTES = 1 << 22  # So much in the queue means that the other end does not keep up.
BEATS = 5  # So many beats go into the time after which silence is a loss.


class Channel:
    """One end. `received` gets kind and fields of each message; `ended` is called once.

    The file descriptors are the channel's from now on.
    """

    def __init__(
        self, loop: EventLoop, read_fd: int, write_fd: int, *,
        received: Callable[[str, list[Any]], None], ended: Callable[[], None],
        prologue: bytes = b"",
    ) -> None:  # fmt: skip
        self.queued_bytes = 0
        self.heard_at = self.spoke_at = time.monotonic()
        self.open = True
        self._loop, self._read_fd, self._write_fd = loop, read_fd, write_fd
        self._received, self._ended = received, ended
        self._prologue = prologue  # What is to be skipped, up to its end.
        self._input = bytearray()
        self._queue: deque[memoryview] = deque()
        self._feed: Iterator[tuple[Any, ...]] | None = None
        self._fed: Callable[[], None] = lambda: None
        self._closing = False  # Close the writing end when the queue is empty.
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)
        loop.listen(read_fd, self._read)

    def send(self, kind: str, *fields: Any) -> None:
        """Send a message, now or when the other end can take it; after the end, do nothing."""
        # File names need not be text.
        body = msgpack.packb([kind, *fields], unicode_errors="surrogateescape")
        self.send_raw(LENGTH.pack(len(body)) + body)

    def send_raw(self, data: bytes) -> None:
        """Send bytes that are no message."""
        if self._write_fd < 0 or self._closing:
            return
        self.spoke_at = time.monotonic()
        if self._queue:
            self._enqueue(memoryview(data))
            return
        left = self._write_some(memoryview(data))
        if left:
            self._enqueue(left)
            if self._feed is None:  # Else the loop waits already.
                self._loop.when_writable(self._write_fd, self._flush)

    def _enqueue(self, data: memoryview) -> None:
        self._queue.append(data)
        self.queued_bytes += len(data)

    def feed(self, messages: Iterator[tuple[Any, ...]], fed: Callable[[], None]) -> None:
        """Send messages, each only when the one before it has gone; call `fed` after the last.

        What else is sent meanwhile comes between them.
        """
        if self._write_fd >= 0:
            if not self._queue:
                self._loop.when_writable(self._write_fd, self._flush)
            self._feed, self._fed = messages, fed

    def _write_some(self, data: memoryview) -> memoryview:
        """Write what can be written now; return the rest."""
        try:
            while data:
                data = data[os.write(self._write_fd, data) :]
        except BlockingIOError:
            pass
        except OSError:  # Nobody reads: the end of what we read tells when that is over.
            self._stop_writing()
            return memoryview(b"")
        return data

    def _flush(self, _fd: int) -> None:
        while self._queue:
            data = self._queue.popleft()
            self.queued_bytes -= len(data)
            left = self._write_some(data)
            if left:
                self._queue.appendleft(left)
                self.queued_bytes += len(left)
                return
        if self._feed is not None and not self._closing:
            message = next(self._feed, None)
            if message is not None:
                self.send(*message)
                return  # The loop serves others before the next one.
        fed, self._feed = self._feed is not None, None
        self._loop.forget(self._write_fd)
        if self._closing:
            self._stop_writing()
        elif fed:
            self._fed()

    def _read(self, fd: int) -> None:
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end()
            return
        self.heard_at = time.monotonic()
        self._input += data
        if self._prologue and not self._skip_prologue():
            return
        self._parse()

    def _skip_prologue(self) -> bool:
        _, found, rest = self._input.partition(self._prologue)
        if found:
            self._input, self._prologue = rest, b""
        else:
            del self._input[: -len(self._prologue)]
        return bool(found)

    def _parse(self) -> None:
        while len(self._input) >= LENGTH.size and self.open:
            (length,) = LENGTH.unpack_from(self._input)
            if length > MOST_BYTES:
                self._end()
                return
            end = LENGTH.size + length
            if len(self._input) < end:
                return
            body = bytes(self._input[LENGTH.size : end])
            del self._input[:end]
            try:
                kind, *fields = msgpack.unpackb(
                    body, strict_map_key=False, unicode_errors="surrogateescape"
                )
            except ValueError:
                self._end()
                return
            if kind != "beat":
                self._received(kind, fields)

    def _end(self) -> None:
        if self.open:
            self.close()
            self._ended()

    def beat(self, now: float, silence_seconds: float) -> bool:
        """Send a beat where one is due; return whether the other end has been heard in time."""
        if now - self.spoke_at >= silence_seconds / BEATS and not self._queue:
            self.send("beat")
        return now - self.heard_at < silence_seconds or self._has_input()

    def _has_input(self) -> bool:
        """Return whether something waits to be read: it is we who were busy elsewhere."""
        poller = select.poll()
        poller.register(self._read_fd, select.POLLIN)
        return bool(poller.poll(0))

    def close_writing(self) -> None:
        """Close the writing direction once all that was sent has gone."""
        self._closing = True
        if not self._queue:
            self._stop_writing()

    def _stop_writing(self) -> None:
        if self._write_fd >= 0:
            self._loop.forget(self._write_fd)
            if stat.S_ISSOCK(os.fstat(self._write_fd).st_mode):
                # The descriptor that is read keeps the connection: the other end would not notice.
                with (
                    socket.socket(fileno=os.dup(self._write_fd)) as connection,
                    contextlib.suppress(OSError),
                ):
                    connection.shutdown(socket.SHUT_WR)
            os.close(self._write_fd)
            self._write_fd = -1
            self._queue.clear()
            self.queued_bytes = 0
            self._feed = None

    def close(self) -> None:
        """Close both directions at once."""
        self.open = False
        self._stop_writing()
        if self._read_fd >= 0:
            self._loop.forget(self._read_fd)
            os.close(self._read_fd)
            self._read_fd = -1
