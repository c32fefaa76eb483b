"""TCP: ports, networks that are missing or cut, and what is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlite.common.base.errors import HorovodInternalError, PeerLostError
from hvdlite.common.base.networks import Interface
from hvdlite.common.base.topology import Topology
from hvdlite.common.settings.config import Config
from hvdlite.common.transport.base import Incoming
from hvdlite.common.transport.tcp.connect import connect, listen_remote
from hvdlite.common.transport.tcp.transport import TcpTransport
from tests.common.children import living_child
from tests.common.transport import networks
from tests.common.transport.tcp_worlds import (
    TWO_HOSTS,
    exchange_arrays,
    open_pair,
    place_of,
    rings,
    run_world,
    train,
)
from tests.ports import free_ports
from tests.ranks import run_threads
from tests.worlds import InProcessMeeting, TcpWorld

pytestmark = pytest.mark.timeout(30)


def test_ranks_listen_within_the_range_of_ports() -> None:
    low, high = ports = free_ports(4)

    def main(transport: TcpTransport) -> int:
        exchange_arrays(transport)
        return int(place_of(transport, -1)[1])

    topology = Topology(((0, 1), (2, 3)))
    used = run_world(topology, main, Config(tcp_ports=ports))
    assert sorted(used) == list(range(low, high + 1))
    assert sorted(run_world(topology, main, Config(tcp_ports=ports))) == sorted(used)


def test_a_range_of_ports_that_is_used_up_is_named_on_all_ranks() -> None:
    ports = free_ports(2)
    world = TcpWorld(Topology(((0,), (1,), (2,))), Config(tcp_ports=ports))

    def body(rank: int) -> None:
        text = rf"HVDLITE_TCP_PORTS={ports[0]}-{ports[1]}: all 2 ports of 127.0.0.1 are in use"
        with pytest.raises(HorovodInternalError, match=text) as caught:
            world.transport(rank)
        assert "rank " in str(caught.value)

    run_threads(3, body)


def test_an_interface_that_does_not_exist_is_named_on_all_ranks() -> None:
    world = TcpWorld(TWO_HOSTS, Config(network_interfaces=("ib7",)))

    def body(rank: int) -> None:
        with pytest.raises(HorovodInternalError, match=r"HVDLITE_NETWORK_INTERFACES=ib7.*lo"):
            world.transport(rank)

    run_threads(2, body)


def test_an_address_that_cannot_be_bound_is_left_out() -> None:
    good = Interface("lo", "127.0.0.1", 8)
    gone = Interface("eth9", "203.0.113.7", 24)
    ((endpoint, listener),) = listen_remote([gone, good], (), 0)
    assert endpoint.address == listener.getsockname()[0] == "127.0.0.1"  # and not all addresses
    listener.close()
    with pytest.raises(HorovodInternalError, match=r"cannot listen on 203\.0\.113\.7"):
        listen_remote([gone], (), 0)


def run_in_networks(main: Callable[[TcpTransport], Any], config: Config | None = None) -> list[Any]:
    """Run two ranks, each in a network of its own."""
    meeting = InProcessMeeting(2)

    def body(rank: int) -> Any:
        networks.enter(rank)
        deadline = time.monotonic() + 20
        host = f"host {rank}"
        transport = connect(meeting.exchange(rank), config or Config(), deadline, rings, host=host)
        try:
            return main(transport)
        finally:
            transport.close()

    return run_threads(2, body)


V4 = [["10.88.0.1/24"], ["10.88.0.2/24"]]


def test_two_hosts_with_a_bridge_of_the_same_address_find_each_other() -> None:
    bridge = "172.17.0.1"
    with networks.two_networks(V4):
        networks.add_bridge("docker0", f"{bridge}/16")
        run_in_networks(exchange_arrays)
        everything = Config(
            network_interfaces=("docker0", networks.DEVICES[0], networks.DEVICES[1])
        )
        run_in_networks(exchange_arrays, everything)


def test_ranks_that_can_only_meet_themselves_say_what_they_tried() -> None:
    def main(transport: TcpTransport) -> None:
        raise AssertionError("they cannot connect")

    with networks.two_networks(V4):
        networks.add_bridge("docker0", "172.17.0.1/16")
        ports = Config(
            network_interfaces=("docker0",), tcp_ports=(21_000, 21_000), peer_timeout_seconds=2.0
        )
        with pytest.raises(HorovodInternalError) as caught:
            run_in_networks(main, ports)
        text = str(caught.value)
        assert "rank 1" in text
        assert "cannot reach rank 0" in text
        assert "172.17.0.1:21000 from 172.17.0.1: " in text
        assert "firewall" in text
        assert "--network-interfaces" in text


@pytest.mark.parametrize(
    "addresses",
    [
        [["fd99::1/64"], ["fd99::2/64"]],
        [["fe80::1:1/64"], ["fe80::1:2/64"]],
        [["fd99::1/64", "10.88.0.1/24"], ["10.88.0.2/24"]],
    ],
    ids=["ipv6", "link-local", "one common family"],
)
def test_networks_of_ipv6(addresses: list[list[str]]) -> None:
    with networks.two_networks(addresses):
        run_in_networks(exchange_arrays)


def test_a_network_that_drops_everything_is_named() -> None:
    def main(transport: TcpTransport) -> None:
        raise AssertionError("they cannot connect")

    with networks.two_networks(V4):
        for host in networks.NAMES:
            networks.ip("-n", host, "neigh", "add", "10.88.0.9", "lladdr", "02:00:00:00:00:01",
                        "dev", networks.DEVICES[networks.NAMES.index(host)])  # fmt: skip
        networks.ip("-n", networks.NAMES[1], "route", "add", "10.88.0.1/32", "via", "10.88.0.9")
        with pytest.raises(HorovodInternalError, match=r"10\.88\.0\.1:\d+.*no answer within 2 s"):
            run_in_networks(main, Config(peer_timeout_seconds=2.0))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("doing", "limit"),
    [
        ("sending", 2.0),
        ("receiving", 2.0),
        ("idle", 2.0),
        pytest.param("idle", Config().peer_timeout_seconds, marks=pytest.mark.soak),
    ],
)
def test_a_cut_cable_is_noticed_within_the_peer_timeout(doing: str, limit: float) -> None:
    connected = threading.Barrier(2)

    def main(transport: TcpTransport) -> float:
        exchange_arrays(transport, 1000)
        connected.wait(10)
        if transport.rank == 1:
            connected.wait(20)
            return 0.0
        networks.cut_cable()
        began = time.monotonic()
        if doing == "idle":
            messages: list[Incoming] = []
            while not messages:
                messages = transport.receive(15)
            assert messages == [Incoming(1, None)]
        else:
            array = np.zeros(30_000_000, np.uint8)
            move = transport.isend if doing == "sending" else transport.irecv
            with pytest.raises(PeerLostError, match=r"rank 1 .*PEER_TIMEOUT") as caught:
                transport.wait([move(1, array)])
            assert caught.value.rank == 1
        elapsed = time.monotonic() - began
        connected.wait(20)
        return elapsed

    with networks.two_networks(V4):
        elapsed = run_in_networks(main, Config(peer_timeout_seconds=limit))[0]
    assert elapsed < limit + 1.0  # The kernel counts in seconds.


def test_a_rank_that_does_not_read_for_long_is_not_lost() -> None:
    """The window of the connection is closed for longer than the limit; its host answers."""
    limit = 2.0

    def main(transport: TcpTransport) -> None:
        array = np.ones(30_000_000, np.uint8)
        if transport.rank == 0:
            transport.wait([transport.isend(1, array)])
            return
        target = np.zeros_like(array)
        while not transport._data_link(0).streams[0].connected:
            transport._data_link(0).use(array.nbytes)
            transport.receive(0.01)
        threading.Event().wait(2.5 * limit)  # Busy in Python.
        transport.wait([transport.irecv(0, target)])
        assert target.all()

    run_world(TWO_HOSTS, main, Config(peer_timeout_seconds=limit))


def test_a_peer_that_is_killed_is_noticed_at_once() -> None:
    def main(transport: TcpTransport) -> None:
        exchange_arrays(transport, 1000)
        if transport.rank == 1:
            transport._close_sockets()  # As the kernel does.
            return
        with pytest.raises(PeerLostError, match="rank 1"):
            transport.wait([transport.irecv(1, np.zeros(5))])
        assert transport.receive(5) == [Incoming(1, None)]

    run_world(TWO_HOSTS, main)


def open_files() -> int:
    """The number of descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.timeout(120)
def test_nothing_is_left_of_1000_connects() -> None:
    topology = Topology(((0,), (1,)))
    rounds = 500  # Of two ranks.

    def body(rank: int) -> None:
        for world, done in worlds:
            transport = world.transport(rank)
            transport.wait([transport.isend(1 - rank, np.ones(3)),
                            transport.irecv(1 - rank, np.ones(3))])  # fmt: skip
            transport.close()
            done.wait(20)

    worlds = [(TcpWorld(topology), threading.Barrier(2)) for _ in range(3)]
    run_threads(2, body)
    files, threads = open_files(), threading.active_count()
    worlds = [(TcpWorld(topology), threading.Barrier(2)) for _ in range(rounds)]
    run_threads(2, body)
    assert open_files() <= files
    assert threading.active_count() <= threads


def test_a_connect_that_fails_leaves_nothing_open() -> None:
    files = open_files()
    for _ in range(20):
        world = TcpWorld(TWO_HOSTS, Config(network_interfaces=("ib7",)))
        with pytest.raises(HorovodInternalError):
            run_threads(2, world.transport)
    assert open_files() <= files


def test_a_forked_child_does_not_hide_the_death_of_its_parent() -> None:
    with open_pair() as (transports, _):
        train(transports)
        with living_child(lambda: [each.after_fork_in_child() for each in transports]):
            train(transports)
            transports[1]._close_sockets()
            assert transports[0].receive(10) == [Incoming(1, None)]
