"""One agent as the launcher sees it: the process that leads to it, and its channel."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdlite.launcher.channel import PROLOGUE, Channel
from hvdlite.launcher.event_loop import EventLoop
from hvdlite.launcher.signals import die_with_parent

READ_BYTES = 1 << 16
MOST_SAID_BYTES = 1 << 16  # Of standard error; what is said later is dropped.
EXIT_SECONDS = 0.5  # How long a process that has closed its output may take to end.


@dataclass(frozen=True)
class AgentHost:
    """A host of the job, and the ranks that run there."""

    name: str  # as the user gave it
    remote: bool
    ranks: tuple[int, ...]


class AgentConnection:
    """An agent. `received(self, kind, fields)` and `ended(self)` are called by the event loop."""

    def __init__(
        self, host: AgentHost, loop: EventLoop,
        received: Callable[[AgentConnection, str, list[Any]], None],
        ended: Callable[[AgentConnection], None],
    ) -> None:  # fmt: skip
        self.host = host
        self.ready = False
        self.folder = ""  # Its own, there.
        self.channel: Channel | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._loop = loop
        self._received, self._ended = received, ended
        self._said = b""
        self._error_fd = -1

    def spawn(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start the process that is the agent, or leads to it."""
        self.process = subprocess.Popen(
            command,
            env=environ,
            cwd="/",  # No file of the user's shadows a module.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C comes to us alone; we end the job in order.
            preexec_fn=die_with_parent(signal.SIGHUP) if self.host.remote else None,  # noqa: PLW1509
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self._error_fd = self.process.stderr.fileno()
        os.set_blocking(self._error_fd, False)
        self._loop.listen(self._error_fd, self._read_error)
        self.connect(os.dup(self.process.stdout.fileno()), os.dup(self.process.stdin.fileno()))
        self.process.stdin.close()
        self.process.stdout.close()

    def connect(self, read_fd: int, write_fd: int) -> None:
        """Talk with the agent over these file descriptors."""
        self.channel = Channel(
            self._loop, read_fd, write_fd, prologue=PROLOGUE,
            received=lambda kind, fields: self._received(self, kind, fields),
            ended=lambda: self._ended(self),
        )  # fmt: skip

    @property
    def alive(self) -> bool:
        """The agent may still say something, or its process is there."""
        connected = self.channel is not None and self.channel.open
        return connected or (self.process is not None and self.process.poll() is None)

    def send(self, kind: str, *fields: Any) -> None:
        """Send a message, where there is a channel."""
        if self.channel is not None:
            self.channel.send(kind, *fields)

    def let_end(self) -> None:
        """Let the agent end: it ends what is left of its ranks."""
        if self.channel is not None:
            self.channel.close_writing()

    def said(self) -> str:
        """Return what was said on standard error, after a moment for the last words."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(EXIT_SECONDS)
        while self._error_fd >= 0 and self._read_error(self._error_fd):
            pass
        return self._said.decode(errors="replace")

    def _read_error(self, fd: int) -> int:
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self._loop.forget(fd)
            self._error_fd = -1
        self._said = (self._said + data)[:MOST_SAID_BYTES]
        return len(data)

    def kill(self) -> None:
        """End the connection at once. An agent that it led to ends its ranks."""
        if self.channel is not None:
            self.channel.close()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def close(self) -> None:
        """Leave no process and no open file behind."""
        self.kill()
        if self.process is not None:
            self.process.wait()
            assert self.process.stderr
            self._loop.forget(self.process.stderr.fileno())
            self.process.stderr.close()
            self._error_fd = -1
