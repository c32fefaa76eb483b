"""Answers GET requests of other programs in a loop, a few a second, whatever comes.

Those programs prove nothing, unless `find` asks for a proof. Who serves shares its cores with
ranks, so that no flood of requests may take them: after `MOST_A_SECOND` connections the next ones
wait in the kernel's queue, which costs nothing. A connection has one request, without a body, and
`PATIENCE_SECONDS`.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable
from typing import NamedTuple

from hvdlite.common.connections.loop import READ, WRITE, Loop

MOST_A_SECOND = 20
MOST_OPEN = 20
PATIENCE_SECONDS = 5.0
LONGEST_REQUEST = 1 << 13  # With all of its headers.
REQUEST = re.compile(rb"GET (/[!-~]{0,200}) HTTP/1\.[01]\r?\n")
END = re.compile(rb"\r?\n\r?\n")


class Request(NamedTuple):
    """What is asked for; `lines` are those of the headers."""

    path: str
    lines: tuple[str, ...] = ()

    def header(self, name: str) -> str | None:
        """Return the values of a header, joined as by HTTP; None where there is none."""
        pairs = (line.partition(":") for line in self.lines)
        found = [value.strip() for key, _, value in pairs if key.lower() == name]
        return ", ".join(found) if found else None


class Content(NamedTuple):
    """What is found at a path."""

    type: str
    body: bytes
    status: str = "200 OK"
    headers: tuple[tuple[str, str], ...] = ()


Find = Callable[[Request], Content | None]


class HttpServer:
    """Serves what `find` returns for a request; None: there is nothing. It owns the listener."""

    def __init__(self, loop: Loop, listener: socket.socket, find: Find) -> None:
        self._loop, self._listener, self._find = loop, listener, find
        self._open: set[_Request] = set()
        self._accepted, self._second = 0, 0.0
        self._paused = False
        listener.setblocking(False)
        self._loop.watch(listener.fileno(), READ, self._accept)

    @property
    def port(self) -> int:
        """The port at which it listens."""
        return int(self._listener.getsockname()[1])

    def _accept(self, _events: int) -> None:
        now = self._loop.now()
        if now - self._second >= 1.0:
            self._accepted, self._second = 0, now
        self._accepted += 1
        with contextlib.suppress(OSError):  # The other end has left, or no descriptor is left.
            connection, _ = self._listener.accept()
            self._open.add(_Request(self._loop, connection, self._find, self._open.discard))
        if self._accepted >= MOST_A_SECOND or len(self._open) >= MOST_OPEN:
            self._paused = True
            self._loop.forget(self._listener.fileno())
            self._loop.call_at(self._second + 1.0, self._resume)

    def _resume(self) -> None:
        if not self._paused:  # Closed meanwhile.
            return
        if len(self._open) >= MOST_OPEN:
            self._loop.call_after(1.0, self._resume)
            return
        self._paused = False
        self._loop.watch(self._listener.fileno(), READ, self._accept)

    def close(self) -> None:
        """Close all connections; idempotent."""
        if self._listener.fileno() < 0:
            return
        self._paused = False
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        for request in list(self._open):
            request.close()


class _Request:
    def __init__(
        self, loop: Loop, connection: socket.socket, find: Find, closed: Callable[[_Request], None]
    ) -> None:
        self._loop, self._connection, self._find, self._closed = loop, connection, find, closed
        self._read = b""
        self._answer = memoryview(b"")
        connection.setblocking(False)
        loop.watch(connection.fileno(), READ, self._receive)
        self._deadline = loop.call_after(PATIENCE_SECONDS, self.close)

    def _receive(self, _events: int) -> None:
        try:
            data = self._connection.recv(LONGEST_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._read += data
        if END.search(self._read):
            self._answer_with(self._response())
        elif not data:
            self.close()
        elif len(self._read) >= LONGEST_REQUEST:
            self._answer_with(_response("431 Request Header Fields Too Large"))

    def _response(self) -> bytes:
        match = REQUEST.match(self._read)
        if match is None:
            return _response("400 Bad Request")
        lines = END.split(self._read, maxsplit=1)[0].decode("latin-1").splitlines()
        request = Request(match[1].decode("ascii").partition("?")[0], tuple(lines[1:]))
        try:
            content = self._find(request)
        except Exception:  # What is served is no reason to end the program that serves.
            return _response("500 Internal Server Error")
        return _response("404 Not Found") if content is None else _response(content.status, content)

    def _answer_with(self, response: bytes) -> None:
        self._answer = memoryview(response)
        self._loop.watch(self._connection.fileno(), WRITE, self._send)

    def _send(self, _events: int) -> None:
        try:
            self._answer = self._answer[self._connection.send(self._answer) :]
        except BlockingIOError:
            return
        except OSError:
            self._answer = memoryview(b"")
        if not self._answer:
            self.close()

    def close(self) -> None:
        if self._connection.fileno() < 0:
            return
        self._deadline.cancel()
        self._loop.forget(self._connection.fileno())
        with contextlib.suppress(OSError):  # Else what was not read would reset the connection.
            self._connection.shutdown(socket.SHUT_WR)
        self._connection.close()
        self._closed(self)


def _response(status: str, content: Content | None = None) -> bytes:
    found = content or Content("text/plain; charset=utf-8", f"{status}\n".encode())
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {found.type}\r\nContent-Length: {len(found.body)}\r\n"
        "Connection: close\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
    )
    head += "".join(f"{name}: {value}\r\n" for name, value in found.headers)
    return f"{head}\r\n".encode() + found.body
