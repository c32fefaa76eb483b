"""What the ranks print, shown where `hvdlite.spark.run` was called.

Each rank's standard output and error is a connection to the driver. Both ends prove first that they
belong to this job; then comes a line with the rank, and all that follows is what the rank prints.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from hvdlite.common.connections.address import Address, listen
from hvdlite.common.connections.listener import Listener
from hvdlite.common.connections.loop import READ, Loop
from hvdlite.common.connections.prove import Claim
from hvdlite.launcher.agents.call_back import call_back, receiver
from hvdlite.launcher.processes.console import Console
from hvdlite.launcher.processes.output import STREAMS, Output

log = logging.getLogger("hvdlite")
CHUNK_BYTES = 1 << 16
CONNECT_SECONDS = 10.0
LATEST_SECONDS = 60.0  # For which what ranks have left behind may go on printing at the end.


class RankOutput:
    """The connections to the driver of one rank; none where the driver cannot be reached.

    The output stays in the executor's log then, as that of any task.
    """

    def __init__(self, driver: tuple[str, int], secret: str) -> None:
        self._connections: dict[str, socket.socket] = {}
        try:
            for stream in STREAMS:
                address = str(Address(*driver))
                connection = call_back([address], secret, stream, 0.0, CONNECT_SECONDS)
                self._connections[stream] = connection
        except OSError as error:
            log.warning("the ranks print to the executor's log: driver %s: %s", driver, error)
            self.close()

    def streams(self, rank: int) -> dict[str, Any]:
        """Return what a process that is `rank` gets as its standard output and error."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # the driver has gone: Spark ends this task
                connection.sendall(f"{rank}\n".encode())
        return self._connections

    def close(self) -> None:
        """Close this process's ends: the rank alone holds them."""
        while self._connections:
            self._connections.popitem()[1].close()


class _GivenStreams(Console):
    """Writes to the streams that the caller has given, in the place of this process's own."""

    def __init__(self, streams: dict[str, TextIO | None]) -> None:
        super().__init__()
        self._given = {name: stream for name, stream in streams.items() if stream is not None}

    def is_terminal(self, stream: str) -> bool:
        return stream not in self._given and super().is_terminal(stream)

    def write(self, stream: str, text: bytes) -> None:
        if stream not in self._given:
            super().write(stream, text)
            return
        self._given[stream].write(text.decode(errors="replace"))
        self._given[stream].flush()


class DriverOutput:
    """Listens for what `size` ranks print, from start to `close`, in one thread.

    ``accepted(connection, name)`` gets the connections under other names, and must not wait.
    """

    def __init__(
        self, size: int, secret: str, host: str, stdout: Any, stderr: Any, timestamps: bool,
        accepted: Callable[[socket.socket, str], None] | None = None,
    ) -> None:  # fmt: skip
        console = _GivenStreams({"stdout": stdout, "stderr": stderr})
        self._output = Output(range(size), None, timestamps, console)
        self._accepted = accepted
        self._loop = Loop()
        listening = listen(Address(host, 0))
        self.address = (host, listening.getsockname()[1])
        self._listener = Listener(self._loop, [listening], receiver(secret), self._enter)
        self._closes = False
        self._open: set[socket.socket] = set()  # Over which ranks print.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closes:
            self._loop.run_once()
        # Who has called already, and has ended, is let in, and what it has printed is read.
        end, wait = self._loop.now() + CONNECT_SECONDS, 0.0
        last = self._loop.now() + LATEST_SECONDS
        while (self._loop.run_once(wait) or wait) and self._loop.now() < last:
            late = self._open or self._listener.claims()
            wait = max(0.0, end - self._loop.now()) if late else 0.0
        self._listener.close()
        self._loop.close()
        for connection in self._open:
            connection.close()

    def _enter(self, claim: Claim, connection: socket.socket) -> None:
        name = claim.body.decode(errors="replace")
        if name in STREAMS:
            self._open.add(connection)
            self._loop.watch(
                connection.fileno(), READ, partial(self._read, connection, name, bytearray())
            )
        elif self._accepted is not None:
            connection.setblocking(True)
            self._accepted(connection, name)
        else:
            connection.close()

    def _read(self, connection: socket.socket, stream: str, rank: bytearray, _events: int) -> None:
        """Print what a rank has written; its first line is its number, when all tasks have met."""
        try:
            data = connection.recv(CHUNK_BYTES)
            ended = not data
            if not rank.endswith(b"\n"):
                line, newline, data = data.partition(b"\n")
                rank += line + newline
            if data:
                self._output.feed(int(rank), stream, data)
        except BlockingIOError:
            return
        except Exception as error:  # A stream of the caller's may raise anything.
            log.debug("what a rank prints is read no more: %s", error)
            ended = True
        if ended:
            self._loop.forget(connection.fileno())
            self._open.discard(connection)
            connection.close()

    def close(self) -> None:
        """Print what has come, and close; all ranks have ended."""
        self._closes = True
        self._loop.wake()
        self._thread.join()
        self._output.finish()
