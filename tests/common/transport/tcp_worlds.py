"""Worlds of ranks over TCP, as threads of one process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from hvdlite.common.base.topology import Topology
from hvdlite.common.connections import prove
from hvdlite.common.connections.prove import Challenge, Claim
from hvdlite.common.settings.config import Config
from hvdlite.common.transport.base import Incoming
from hvdlite.common.transport.tcp.connections import Identity, Slot
from hvdlite.common.transport.tcp.transport import TcpTransport
from tests.ranks import run_threads
from tests.worlds import TcpWorld

TWO_HOSTS = Topology(((0,), (1,)))


def rings(topology: Topology, rank: int) -> list[int]:
    """All other ranks."""
    return [other for other in range(topology.size) if other != rank]


def exchange_arrays(transport: TcpTransport, size: int = 300_000) -> None:
    """Send an array to each other rank, and check what comes."""
    for other in rings(transport.topology, transport.rank):
        target = np.zeros(size, np.int32)
        sent = np.full(size, transport.rank, np.int32)
        transport.wait([transport.irecv(other, target), transport.isend(other, sent)])
        assert (target == other).all()


def run_world(
    topology: Topology, main: Callable[[TcpTransport], Any], config: Config | None = None, **kw: Any
) -> list[Any]:
    """Run `main` on every rank, then close."""
    world = TcpWorld(topology, config, **{"neighbours": rings, **kw})
    ready = threading.Barrier(topology.size)

    def body(rank: int) -> Any:
        transport = world.transport(rank)
        try:
            result = main(transport)
            with suppress(threading.BrokenBarrierError):
                ready.wait(20)
            return result
        except BaseException:
            ready.abort()
            raise
        finally:
            transport.close()

    return run_threads(topology.size, body)


def place_of(transport: TcpTransport, index: int = 0) -> Any:
    """Where a rank listens."""
    return transport._connections.listener.names()[index]


def prove_claim(connection: socket.socket, me: Identity, slot: Slot) -> bytes:
    """What a rank says on a new connection to claim a slot."""
    challenge = Challenge.unpack(connection.recv(prove.CHALLENGE.size, socket.MSG_WAITALL))
    return prove.prove_claim(me.key, challenge, Claim.new(me.party, me.claim(slot)))


@contextmanager
def open_pair(**options: Any) -> Iterator[tuple[list[TcpTransport], list[Any]]]:
    """Two ranks of two hosts that train until the block ends; and where they listen."""
    world = TcpWorld(TWO_HOSTS, Config(), **{"neighbours": rings, **options})
    transports = run_threads(2, world.transport)
    places = [place_of(transport) for transport in transports]
    try:
        yield transports, places
    finally:
        run_threads(2, lambda rank: transports[rank].close())


def train(transports: list[TcpTransport], rounds: int = 3) -> None:
    """Exchange messages and arrays."""

    def main(rank: int) -> None:
        for _ in range(rounds):
            exchange_arrays(transports[rank], 1000)
            transports[rank].send(1 - rank, b"x")
            assert transports[rank].receive(10) == [Incoming(1 - rank, b"x")]

    run_threads(2, main)
