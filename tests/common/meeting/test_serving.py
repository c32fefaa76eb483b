"""A meeting that a process serves in a thread, as the first worker of a cluster does."""

from __future__ import annotations

import os
import socket
import time

import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.connections.address import Address, listen
from hvdlite.common.meeting.meet import ServedMeeting
from tests.common.meeting.exchanges import at_server
from tests.ranks import run_threads

SIZE = 3


def meet(address: str, rank: int, body: bytes, seconds: float = 20) -> list[bytes]:
    deadline = time.monotonic() + seconds
    exchange = at_server(address, rank, SIZE, b"secret", deadline)
    bodies = exchange.allgather(body)
    exchange.close()
    return bodies


def test_ranks_meet_again_and_again_until_it_is_closed() -> None:
    listener = listen(Address("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    meeting = ServedMeeting(listener, SIZE, "secret")
    for number in range(3):
        bodies = [b"%d of %d" % (rank, number) for rank in range(SIZE)]
        got = run_threads(SIZE, lambda rank, bodies=bodies: meet(address, rank, bodies[rank]))
        assert got == [bodies] * SIZE
    meeting.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 5)
    with pytest.raises(HorovodInternalError):
        meet(address, 0, b"", seconds=0.2)


def test_a_forked_child_does_not_hold_the_port() -> None:
    listener = listen(Address("127.0.0.1", 0))
    port = listener.getsockname()[1]
    meeting = ServedMeeting(listener, SIZE, "secret")
    looked, tell = os.pipe()
    forked, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        os.write(say, b"1")  # what is called after a fork has been called
        os.read(looked, 1)
        os._exit(0)
    os.close(looked)
    assert os.read(forked, 1) == b"1"
    meeting.close()
    try:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), 5)
    finally:
        for descriptor in (tell, forked, say):
            os.close(descriptor)
        os.waitpid(child, 0)
