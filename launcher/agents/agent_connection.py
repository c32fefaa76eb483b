"""One agent as the launcher sees it: its host, its channel, and the process that leads to it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hvdlite.launcher.agents.channel import PROLOGUE, Channel
from hvdlite.launcher.processes.child import LeadingProcess
from hvdlite.launcher.processes.event_loop import EventLoop


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
        self.ready = False  # It has accepted the job.
        self.supplied = False  # It has the files that its ranks need.
        self.gone = False  # It ended while its ranks ran.
        self.folder = ""  # Its own, there.
        self.channel: Channel | None = None
        self.leader: LeadingProcess | None = None  # That leads to this agent alone.
        self._loop = loop
        self._received, self._ended = received, ended

    def follow(self, leader: LeadingProcess) -> None:
        """Talk with the agent over the streams of the process that leads to it."""
        self.leader = leader
        self.connect(*leader.take_streams())

    def connect(self, read_fd: int, write_fd: int) -> None:
        """Talk with the agent over these file descriptors."""
        self.channel = Channel(
            self._loop, read_fd, write_fd, prologue=PROLOGUE,
            received=lambda kind, fields: self._received(self, kind, fields),
            ended=lambda: self._ended(self),
        )  # fmt: skip

    @property
    def connected(self) -> bool:
        """The agent may still say something."""
        return self.channel is not None and self.channel.open

    def send(self, kind: str, *fields: Any) -> None:
        if self.channel is not None:
            self.channel.send(kind, *fields)

    def send_data(self, kind: str, *fields: Any, data: bytes) -> None:
        """Send a message with data, where there is a channel; see `Channel.send_data`."""
        if self.channel is not None:
            self.channel.send_data(kind, *fields, data=data)

    def feed(self, messages: Iterator[tuple[Any, ...]], fed: Callable[[], None]) -> None:
        """Send messages as the agent takes them; see `Channel.feed`."""
        if self.channel is not None:
            self.channel.feed(messages, fed)

    def beat(self, now: float, silence_seconds: float) -> bool:
        """Send a beat where one is due; return whether the agent has been heard in time."""
        if not self.ready or self.channel is None or not self.channel.open:
            return True
        return self.channel.beat(now, silence_seconds)

    def last_words(self) -> tuple[str, int | None]:
        """Return what the process that leads to the agent has said, and its exit code."""
        leader = self.leader
        return (leader.said().strip(), leader.code) if leader else ("", None)

    def let_end(self) -> None:
        """Let the agent end: it ends what is left of its ranks."""
        if self.channel is not None:
            self.channel.close_writing()

    def dismiss(self) -> None:
        """Let the agent end, or what leads to one on another host where it has not come yet.

        An agent of this host may just have made its folder, so that it must not be killed.
        """
        if self.folder or not self.host.remote:
            self.let_end()
        else:
            self.kill()

    def kill(self) -> None:
        """End the connection at once. An agent that it led to ends its ranks."""
        if self.channel is not None:
            self.channel.close()
        if self.leader is not None:
            self.leader.signal(signal.SIGKILL)

    def close(self) -> None:
        """Leave no process and no open file behind."""
        self.kill()
        if self.leader is not None:
            self.leader.close()
