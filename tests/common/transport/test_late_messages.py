"""What a rank of an old world sends late: nobody of the next world receives any of it."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import numpy as np
import pytest

from hvdlite.common.base.errors import PeerLostError
from hvdlite.common.base.topology import Topology
from hvdlite.common.connections import prove
from hvdlite.common.settings.config import Config
from hvdlite.common.transport.tcp.connections import CONTROL_ONE_WAY, DATA, Identity, Slot
from hvdlite.common.transport.tcp.transport import TcpTransport
from tests.common.transport.tcp_worlds import (
    TWO_HOSTS,
    exchange_arrays,
    place_of,
    prove_claim,
    rings,
    train,
)
from tests.ports import free_ports
from tests.ranks import run_threads
from tests.worlds import TcpWorld

pytestmark = pytest.mark.timeout(30)

THREE_HOSTS = Topology(((0,), (1,), (2,)))
STREAMS = 2  # The second one is dialled for the first large array.
LARGE = 300_000


def world(topology: Topology, config: Config, epoch: int) -> list[TcpTransport]:
    """The connected ranks of one world of a job."""
    made = TcpWorld(topology, config, neighbours=rings, epoch=epoch, secret=b"s")
    return run_threads(topology.size, made.transport)


def test_messages_and_arrays_of_a_rank_that_was_given_up_are_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was stopped, and goes on when the others are in the next world, at the same ports."""
    caplog.set_level("DEBUG", "hvdlite")
    config = Config(tcp_ports=free_ports(3), tcp_streams=STREAMS, peer_timeout_seconds=1.0)
    old = world(THREE_HOSTS, config, epoch=1)
    run_threads(3, lambda rank: exchange_arrays(old[rank], 1000))
    stopped = old[2]
    for rank in (0, 1):  # These are on their way while the others leave.
        stopped.send(rank, b"x")
        stopped.isend(rank, np.full(1000, 7, np.int32))
    for transport in old[:2]:
        transport._close_sockets()  # As a rank leaves a world that is broken.
    new = world(TWO_HOSTS, config, epoch=2)
    lost: list[PeerLostError] = []

    def go_on() -> None:
        late = np.full(LARGE, 8, np.int32)
        for rank in (0, 1):
            with suppress(PeerLostError):  # Here or below.
                stopped.send(rank, b"x")
            try:
                stopped.wait([stopped.isend(rank, late)])
            except PeerLostError as error:
                lost.append(error)

    late = threading.Thread(target=go_on)
    late.start()
    while late.is_alive():
        train(new)  # Counts every message, and compares every array.
    train(new)
    assert [error.rank for error in lost] == [0, 1]
    for transport in (stopped, *new):
        transport._close_sockets()


@pytest.mark.parametrize("word_for_word", [True, False])
@pytest.mark.parametrize("channel", [DATA, CONTROL_ONE_WAY])
def test_a_rank_of_the_old_world_is_refused_in_the_next(channel: int, word_for_word: bool) -> None:
    """A delayed connection brings all that a rank said, or the rank itself dials once more.

    In the next world there is another rank with its number, whose connections it must not take.
    """
    config = Config(tcp_ports=free_ports(2))
    said: list[bytes] = []
    answers: list[bytes] = []

    def knock(me: Identity, place: tuple[str, int]) -> None:
        with socket.create_connection(place, timeout=10) as connection, suppress(ConnectionError):
            said.append(prove_claim(connection, me, Slot(0, channel)))
            answers.append(b"")
            if len(said) == 1:
                connection.sendall(said[0])
            else:  # All at once, with a message or an array after it.
                sent = said[0] if word_for_word else said[1]
                connection.sendall(sent + prove.GO + (5).to_bytes(8, "little") + b"late!")
            answers[-1] = connection.recv(1)

    old: list[Identity] = []
    for epoch in (1, 2):
        transports = world(TWO_HOSTS, config, epoch)
        place = place_of(transports[0])
        old.append(transports[1]._connections.me)
        knocking = threading.Thread(target=knock, args=(old[0], place))
        knocking.start()
        while knocking.is_alive():
            assert transports[0].receive(0.01) == []
        train(transports)
        run_threads(2, lambda rank, world=transports: world[rank].close())
    assert [answer[0] for answer in answers] == [prove.ACCEPTED, prove.OTHER_SECRET]
