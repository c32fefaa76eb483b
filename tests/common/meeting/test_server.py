"""Meetings at a server: rounds, ranks that are late, wrong or lost, strangers, and attacks."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.connections.address import Address, listen
from hvdlite.common.meeting import wire
from hvdlite.common.meeting.meet import ServedMeeting
from hvdlite.common.meeting.rounds import Key
from tests.common.children import living_child
from tests.common.meeting.serving import (
    SECRET,
    Driver,
    at_server,
    expected,
    hosting,
    meet,
    port_of,
    serving,
    soon,
)
from tests.ranks import run_threads


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_rank_gets_every_body_in_rank_order(size: int) -> None:
    with serving(size) as (address, _):
        results = run_threads(
            size, lambda rank: meet(at_server(address, rank, size, SECRET, soon()))
        )
    assert results == [expected(size)] * size


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_rank_0_serves_while_it_waits(host: str) -> None:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    try:
        listener = listen(Address(host, port))
    except OSError as error:
        pytest.skip(f"{host}: {error}")

    def rank_main(rank: int) -> Any:
        if rank == 0:
            return meet(hosting(listener, 0, 3, SECRET, soon()))
        return meet(at_server(str(Address(host, port)), rank, 3, SECRET, soon()))

    assert run_threads(3, rank_main) == [expected(3)] * 3
    with socket.create_server(("", port)):  # Torch's store can have the port now.
        pass


def test_a_part_of_the_ranks_meets_in_the_order_of_its_list() -> None:
    members = [3, 1]

    def rank_main(rank: int) -> Any:
        part = members if rank in members else [0, 2]
        exchange = at_server(address, rank, 4, SECRET, soon(), part)
        assert (exchange.rank, exchange.size) == (part.index(rank), 2)
        return meet(exchange)

    with serving(4) as (address, _):
        assert run_threads(4, rank_main) == [expected(2)] * 4


@pytest.mark.thorough
def test_a_thousand_meetings_one_after_the_other() -> None:
    def rank_main(rank: int) -> None:
        for _ in range(1000):
            assert meet(at_server(address, rank, 2, SECRET, soon()), 1) == expected(2, 1)

    with serving(2) as (address, driver):
        run_threads(2, rank_main)
        assert not driver.server.notes()


@pytest.mark.thorough
def test_many_meetings_that_rank_0_serves() -> None:
    listeners = [listen(Address("127.0.0.1", 0))]
    address = port_of(listeners[0])

    def rank_main(rank: int) -> None:
        for _ in range(100):
            if rank == 0:
                listener = listeners.pop() if listeners else listen(address)
                exchange: Any = hosting(listener, 0, 2, SECRET, soon())
            else:
                exchange = at_server(address, 1, 2, SECRET, soon())
            assert meet(exchange, 2) == expected(2, 2)

    run_threads(2, rank_main)


def test_large_bodies_arrive_whole_and_too_large_ones_are_refused_at_the_call() -> None:
    body = os.urandom(wire.BODY_BYTES)

    def rank_main(rank: int) -> None:
        exchange = at_server(address, rank, 3, SECRET, soon())
        with pytest.raises(ValueError, match="too many for a meeting"):
            exchange.allgather(body + b"x")
        assert exchange.allgather(body) == [body] * 3
        exchange.close()

    with serving(3) as (address, _):
        run_threads(3, rank_main)


def test_the_servers_of_two_hosts_gather_for_whoever_merges_them() -> None:
    """What an agent on each host and the launcher do."""
    merged: dict[Key, dict[int, bytes]] = {}
    lock = threading.Lock()
    drivers: list[Driver] = []

    def gathered(key: Key, bodies: dict[int, bytes]) -> None:
        with lock:
            merged.setdefault(key, {}).update(bodies)
            if len(merged[key]) < 4:
                return
            answer = [merged[key][rank] for rank in range(4)]
        threading.Thread(target=deliver, args=(key, answer)).start()

    def deliver(key: Key, answer: list[bytes]) -> None:
        for driver in drivers:
            with driver.lock:
                driver.server.rounds.deliver(key, answer)

    with (
        serving(4, ranks=(0, 1), gathered=gathered) as (first, a),
        serving(4, ranks=(2, 3), gathered=gathered) as (second, b),
    ):
        drivers += [a, b]
        results = run_threads(
            4,
            lambda rank: meet(at_server((first, second)[rank // 2], rank, 4, SECRET, soon())),
        )
    assert results == [expected(4)] * 4


@pytest.mark.parametrize("told", [False, True])
def test_of_several_hosts_those_are_named_that_are_known_here(told: bool) -> None:
    """Of ranks 0 and 1 here, 0 has come; of 2 to 4 elsewhere, all but 3."""
    with serving(5, ranks=(0, 1), gathered=lambda *_: None) as (address, driver):
        if told:
            with driver.lock:
                driver.server.rounds.missing_elsewhere[()] = [1, 3]
        with pytest.raises(HorovodInternalError) as raised:
            meet(at_server(address, 0, 5, SECRET, soon(0.3)))
    known = "1, 3 (seen: 0, 2, 4)" if told else "1 (seen on this host: 0)"
    assert f"these ranks did not come: {known}" in str(raised.value)


def test_ranks_meet_again_and_again_in_a_thread_until_it_is_closed() -> None:
    listener = listen(Address("127.0.0.1", 0))
    address, meeting = port_of(listener), ServedMeeting(listener, 3, SECRET.decode())
    for _ in range(3):
        got = run_threads(3, lambda rank: meet(at_server(address, rank, 3, SECRET, soon())))
        assert got == [expected(3)] * 3
    meeting.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(address[:2], 5)
    with pytest.raises(HorovodInternalError):
        meet(at_server(address, 0, 3, SECRET, soon(0.2)))


def test_a_forked_child_does_not_hold_the_port() -> None:
    listener = listen(Address("127.0.0.1", 0))
    port = listener.getsockname()[1]
    meeting = ServedMeeting(listener, 3, SECRET.decode())
    with living_child():  # What is called after a fork has been called.
        meeting.close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), 5)
