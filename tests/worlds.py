"""Transports for ranks that are threads: in process, or over real sockets."""

from __future__ import annotations

import time
from typing import Any, Protocol

from hvdlite.common.base.topology import Topology
from hvdlite.common.decisions.control_tree import neighbours
from hvdlite.common.meeting.exchange import InProcessMeeting
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


class TcpWorld:
    """Ranks on hosts with made-up names; between these they use TCP over the loopback."""

    def __init__(self, topology: Topology, config: Config | None = None, **options: Any) -> None:
        self._topology = topology
        self._config = config or Config()
        self._meeting = InProcessMeeting(topology.size, CONNECT_SECONDS)
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
