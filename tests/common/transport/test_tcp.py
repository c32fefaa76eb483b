"""TCP between hosts: who may connect, how connections are found, and how they end."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.topology import Topology
from hvdlite.common.settings.config import Config
from hvdlite.common.transport.base import Incoming
from hvdlite.common.transport.tcp import connect as connect_module
from hvdlite.common.transport.tcp.connect import connect
from hvdlite.common.transport.tcp.transport import TcpTransport
from tests.common.transport.tcp_worlds import TWO_HOSTS, exchange_arrays, rings, run_world
from tests.ranks import run_threads
from tests.worlds import InProcessMeeting, TcpWorld

pytestmark = pytest.mark.timeout(30)


def tcp_sockets() -> int:
    """The number of TCP sockets of this process."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(entry).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                    count += copy.family in (socket.AF_INET, socket.AF_INET6)
    return count


def test_a_job_on_one_host_opens_no_tcp_socket() -> None:
    before = tcp_sockets()

    def main(transport: TcpTransport) -> int:
        exchange_arrays(transport)
        return tcp_sockets() - before

    assert run_world(Topology.single_host(2), main) == [0, 0]


def test_data_connections_are_made_at_first_use() -> None:
    """A job of many ranks holds the edges of its control tree, and not a socket for each pair."""
    together = threading.Barrier(3)

    def main(transport: TcpTransport) -> list[list[int]]:
        used = []
        for pair in ([], [1, 2]):
            if transport.rank in pair:
                (other,) = set(pair) - {transport.rank}
                moves = [transport.irecv(other, np.zeros(9)), transport.isend(other, np.ones(9))]
                transport.wait(moves)
            together.wait(10)
            transport.receive(0.0)
            used.append([rank for rank, link in transport._data.items() if link.connected])
            together.wait(10)
        return used

    topology = Topology(((0,), (1,), (2,)))
    assert run_world(topology, main) == [[[], []], [[], [2]], [[], [1]]]


def test_arrays_are_not_copied_on_their_way() -> None:
    """numpy and Python tell tracemalloc of all memory that they take."""
    size = 20_000_000
    ready = threading.Barrier(2)

    def main(transport: TcpTransport) -> int:
        other = 1 - transport.rank
        sent, target = np.full(size, transport.rank, np.uint8), np.zeros(size, np.uint8)
        ready.wait(10)
        tracemalloc.start()  # Again has no effect.
        transport.wait([transport.irecv(other, target), transport.isend(other, sent)])
        ready.wait(10)
        peak = tracemalloc.get_traced_memory()[1]
        ready.wait(10)
        assert (target == other).all()
        return peak

    try:
        assert max(run_world(TWO_HOSTS, main)) < size / 4
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("streams", [2, 3])
def test_several_streams(streams: int) -> None:
    def main(transport: TcpTransport) -> int:
        for size in (1, 20_000, 100_000, 262_144, 262_145, 1_000_003):
            exchange_arrays(transport, size)
        return len(transport._data[1 - transport.rank].streams)

    config = Config(tcp_streams=streams)
    assert run_world(TWO_HOSTS, main, config) == [streams, streams]


def test_the_streams_of_rank_0_hold_where_ranks_disagree() -> None:
    meeting, hosts = InProcessMeeting(2), ("a", "b")

    def body(rank: int) -> None:
        config, deadline = Config(tcp_streams=2 + rank), time.monotonic() + 20
        transport = connect(meeting.exchange(rank), config, deadline, rings, host=hosts[rank])
        exchange_arrays(transport)
        assert len(transport._data[1 - rank].streams) == 2
        transport.close()

    run_threads(2, body)


def test_arrays_and_messages_in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes and gives a few bytes at a time, also parts of headers."""
    real = connect_module.Connections.__init__

    def small(self: Any, *args: Any) -> None:
        for listener in args[2]:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        real(self, *args)

    monkeypatch.setattr(connect_module.Connections, "__init__", small)
    body = bytes(range(256)) * 300

    def main(transport: TcpTransport) -> None:
        other = 1 - transport.rank
        transport.send(other, body)
        exchange_arrays(transport, 20_001)
        messages: list[Incoming] = []
        while not messages:
            messages = transport.receive(10)
        assert messages == [Incoming(other, body)]

    run_world(TWO_HOSTS, main)


def test_the_end_of_a_rank_comes_after_its_messages_off_the_control_tree() -> None:
    """Ranks without a connection that send to each other at once have two: either may end first."""
    for _ in range(40):
        world = TcpWorld(TWO_HOSTS, neighbours=lambda topology, rank: ())

        def main(rank: int, world: TcpWorld = world) -> None:
            transport = world.transport(rank)
            transport.send(1 - rank, b"short")
            transport.send(1 - rank, bytes(200_000))
            received: list[int | None] = []
            while len(received) < (2 if rank else 3):
                messages = transport.receive(10)
                assert messages, received
                received += [None if body is None else len(body) for _, body in messages]
            transport.close()
            assert received == [5, 200_000, None][: len(received)]

        run_threads(2, main)


def test_messages_are_received_while_an_array_is_awaited() -> None:
    """The array comes only after the message was answered from within the wait."""

    def main(transport: TcpTransport) -> None:
        if transport.rank == 0:
            transport.call_while_waiting(
                lambda: [transport.send(r, b"go") for r, _ in transport.receive(0)]
            )
            transport.wait([transport.irecv(1, np.zeros(5))])
        else:
            transport.send(0, b"may I?")
            assert transport.receive(10) == [Incoming(0, b"go")]
            transport.wait([transport.isend(0, np.zeros(5))])

    run_world(TWO_HOSTS, main)


def test_a_wake_during_a_wait_negotiates_at_once_and_ends_the_next_receive() -> None:
    def main(transport: TcpTransport) -> None:
        if transport.rank == 1:
            assert transport.receive(10) == [Incoming(0, b"woken")]
            transport.wait([transport.isend(0, np.zeros(5))])
            return
        calls: list[float] = []

        def negotiate() -> None:
            if not calls:
                transport.send(1, b"woken")
            calls.append(time.monotonic())

        transport.call_while_waiting(negotiate)
        transport.wake()
        transport.wait([transport.irecv(1, np.zeros(5))])
        assert transport.receive(None) == []

    run_world(TWO_HOSTS, main)


def test_arrays_move_while_a_rank_waits_for_a_local_one() -> None:
    size = 8_000_000  # More than the kernel holds.

    def main(transport: TcpTransport) -> None:
        if transport.rank == 0:
            receive = transport.irecv(2, np.zeros(size, np.uint8))
            transport.await_signal(1)  # Rank 1 signals when rank 2 has sent all.
            transport.wait([receive])
        elif transport.rank == 1:
            assert transport.receive(10) == [Incoming(2, b"sent")]
            transport.signal([0])
        else:
            transport.wait([transport.isend(0, np.zeros(size, np.uint8))])
            transport.send(1, b"sent")

    run_world(Topology(((0, 1), (2,))), main)


def test_arrays_move_in_waits_outside_of_the_transport() -> None:
    """Compiled code waits for local ranks, while ranks of other hosts may wait for this one."""
    sent = threading.Event()

    def main(transport: TcpTransport) -> None:
        array = np.zeros(8_000_000, np.uint8)  # More than the kernel holds.
        if transport.rank == 1:
            transport.wait([transport.isend(0, array)])
            sent.set()
            return
        receive = transport.irecv(1, array)
        deadline = time.monotonic() + 10
        while not sent.is_set():
            assert time.monotonic() < deadline
            transport.while_waiting()
        transport.wait([receive])

    run_world(TWO_HOSTS, main)


@pytest.mark.parametrize("name", ["_listen_locally", "listen_remote"])
def test_what_one_rank_cannot_open_is_told_to_all(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """They would wait for it otherwise, and say that it has not come."""
    rank_here, real = threading.local(), getattr(connect_module, name)

    def fail(*words: Any) -> Any:
        if rank_here.rank == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*words)

    monkeypatch.setattr(connect_module, name, fail)
    world = TcpWorld(Topology(((0, 1), (2,))))

    def main(rank: int) -> None:
        rank_here.rank = rank
        with pytest.raises(HorovodInternalError, match=r"rank 1 \(.*Too many open files"):
            world.transport(rank)

    run_threads(3, main)
