"""Transports for ranks that are threads: in process, or over real sockets."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.topology import Topology
from hvdlite.common.decisions.control_tree import neighbours
from hvdlite.common.meeting.exchange import Exchange
from hvdlite.common.settings.config import Config
from hvdlite.common.transport.base import Transport
from hvdlite.common.transport.inprocess import InProcessWorld
from hvdlite.common.transport.tcp.connect import connect
from hvdlite.common.transport.tcp.transport import TcpTransport

IN_PROCESS, TCP = "in process", "tcp"
CONNECT_SECONDS = 20.0


class World(Protocol):
    """All ranks of one job."""

    def transport(self, rank: int) -> Transport:
        """The transport of `rank`; the ranks call this at the same time, each in its thread."""


class InProcessMeeting:
    """The meeting of `size` ranks that are threads of one process."""

    def __init__(self, size: int, limit_seconds: float = CONNECT_SECONDS) -> None:
        self.size = size
        self.limit_seconds = limit_seconds
        # Guards the rounds, and tells of a new body.
        self.changed = threading.Condition()
        self.rounds: list[dict[int, bytes]] = []

    def exchange(self, rank: int) -> Exchange:
        return _InProcessExchange(self, rank)


class _InProcessExchange:
    def __init__(self, meeting: InProcessMeeting, rank: int) -> None:
        self.rank, self.size = rank, meeting.size
        self._meeting = meeting
        self._round = 0

    def allgather(self, body: bytes) -> list[bytes]:
        meeting, number = self._meeting, self._round
        self._round += 1
        with meeting.changed:
            if len(meeting.rounds) == number:
                meeting.rounds.append({})
            bodies = meeting.rounds[number]
            bodies[self.rank] = bytes(body)
            meeting.changed.notify_all()
            if not meeting.changed.wait_for(lambda: len(bodies) == self.size,
                                            meeting.limit_seconds):  # fmt: skip
                missing = ", ".join(str(r) for r in range(self.size) if r not in bodies)
                raise HorovodInternalError(f"these ranks did not come: {missing}")
            return [bodies[rank] for rank in range(self.size)]

    def close(self) -> None:
        """See `Exchange.close`."""


class TcpWorld:
    """Ranks on hosts with made-up names; between these they use TCP over the loopback."""

    def __init__(self, topology: Topology, config: Config | None = None, **options: Any) -> None:
        self._topology = topology
        self._config = config or Config()
        self._meeting = InProcessMeeting(topology.size)
        self._options = {"neighbours": neighbours, **options}

    def transport(self, rank: int) -> TcpTransport:
        """See `World`."""
        return connect(
            self._meeting.exchange(rank),
            self._config,
            time.monotonic() + CONNECT_SECONDS,
            host=f"host {self._topology.host_of[rank]}",
            **self._options,
        )


def make_world(kind: str, topology: Topology, config: Config | None = None) -> World:
    """The world of a kind: IN_PROCESS or TCP."""
    return InProcessWorld(topology) if kind == IN_PROCESS else TcpWorld(topology, config)
