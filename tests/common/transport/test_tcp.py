"""TCP between hosts: who may connect, how connections are found, and how they end."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlite.common.base.errors import HorovodInternalError, PeerLostError, ProtocolError
from hvdlite.common.base.topology import Topology
from hvdlite.common.meeting import handshake
from hvdlite.common.meeting.exchange import InProcessMeeting
from hvdlite.common.plain.config import Config
from hvdlite.common.transport.base import Incoming
from hvdlite.common.transport.poller import Poller
from hvdlite.common.transport.tcp import connect as connect_module
from hvdlite.common.transport.tcp import connections, listeners
from hvdlite.common.transport.tcp.addresses import Target
from hvdlite.common.transport.tcp.connect import connect
from hvdlite.common.transport.tcp.dials import Dial, Limits
from hvdlite.common.transport.tcp.strangers import CLAIM, CONTROL, DATA, Identity, Slot
from hvdlite.common.transport.tcp.transport import TcpTransport
from tests.common.transport import networks
from tests.ranks import run_threads
from tests.worlds import TcpWorld

pytestmark = pytest.mark.timeout(30)

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


def test_ranks_of_three_hosts_exchange_arrays() -> None:
    run_world(Topology(((0, 1), (2,), (3,))), exchange_arrays)


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


# -- strangers


@contextmanager
def open_pair(**options: Any) -> Iterator[tuple[list[TcpTransport], list[tuple[str, int]]]]:
    """Two ranks of two hosts that train until the block ends; and where they listen."""
    world = TcpWorld(TWO_HOSTS, Config(), **{"neighbours": rings, **options})
    transports = run_threads(2, world.transport)
    places = [transport._connections._listeners[0].getsockname() for transport in transports]
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


ATTACKS = {
    "silence": b"",
    "a web browser": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 10,
    "a length of 1 GB": b"\x00\x00\x00\x40" * 40,
    "half a claim": bytes(20),
    "zeros": bytes(10_000),
}


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed it; waits a little."""
    connection.settimeout(10)
    try:
        while connection.recv(1000):
            pass
    except ConnectionError:
        return True
    return True


@pytest.mark.parametrize("attack", ATTACKS)
def test_foreign_connections_are_closed_and_disturb_nothing(
    attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.3)
    with open_pair() as (transports, places):
        strangers = [socket.create_connection(place) for place in places for _ in range(5)]
        for stranger in strangers:
            with suppress(ConnectionError):
                stranger.sendall(ATTACKS[attack])
        train(transports)
        end = time.monotonic() + 0.4
        while time.monotonic() < end:  # Engines sleep here; timers end what is silent.
            run_threads(2, lambda rank: transports[rank].receive(0.05))
        for stranger in strangers:
            assert is_closed(stranger)
            stranger.close()
        train(transports)


def test_a_half_open_connection_that_leaves_disturbs_nothing() -> None:
    with open_pair() as (transports, places):
        for place in places * 20:
            socket.create_connection(place).close()
        train(transports)
        deadline = time.monotonic() + 10
        while any(transport._connections._guests for transport in transports):
            assert time.monotonic() < deadline
            run_threads(2, lambda rank: transports[rank].receive(0.01))


def knock(place: tuple[str, int], key: bytes, claim: bytes) -> bytes:
    """What a rank answers to a claim that is proved with `key`."""
    with socket.create_connection(place, timeout=10) as connection:
        theirs, mine = connection.recv(16), handshake.new_nonce()
        connection.sendall(
            mine + claim + handshake.proof(key, handshake.CONNECTS, theirs + mine, claim)
        )
        with suppress(ConnectionError):
            return connection.recv(100)
    return b""


def knock_on(transport: TcpTransport, key: bytes, claim: bytes) -> bytes:
    """What a rank answers to a claim, while it goes on."""
    answers: list[bytes] = []
    place = transport._connections._listeners[0].getsockname()
    knocking = threading.Thread(target=lambda: answers.append(knock(place, key, claim)))
    knocking.start()
    while knocking.is_alive():
        transport.receive(0.01)
    return answers[0]


@pytest.mark.parametrize(
    ("change", "slot"),
    [
        ({}, Slot(0, DATA, 0)),
        ({"key": bytes(32)}, Slot(0, DATA, 0)),
        ({"epoch": 8}, Slot(0, DATA, 0)),
        ({"rank": 2}, Slot(0, DATA, 0)),
        ({"rank": 0}, Slot(0, DATA, 0)),
        ({}, Slot(1, DATA, 0)),
        ({}, Slot(0, 7, 0)),
        ({}, Slot(0, DATA, 200)),
        ({}, Slot(0, CONTROL, 0)),
    ],
    ids=["right", "key", "epoch", "foreign rank", "itself", "another rank", "channel", "stream",
         "there already"],
)  # fmt: skip
def test_a_claim_must_be_right_in_every_word(change: dict[str, Any], slot: Slot) -> None:
    with open_pair(epoch=7, secret=b"s") as (transports, _):
        me = transports[1]._connections.me
        assert (me.rank, me.epoch) == (1, 7)
        false = Identity(**{**me._asdict(), **change})
        answer = knock_on(transports[0], false.key, false.claim(slot))
        right = not change and slot == Slot(0, DATA, 0)
        assert len(answer) == (32 if right else 0)


def test_a_rank_of_another_epoch_is_refused_with_both_epochs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It knows the key of this world: the ranks have met, but count the worlds differently."""
    with open_pair(epoch=7) as (transports, _):
        me = transports[1]._connections.me
        for epoch in (6, 8):
            caplog.clear()
            other = me._replace(epoch=epoch)
            assert knock_on(transports[0], me.key, other.claim(Slot(0, DATA))) == b""
            (record,) = (r for r in caplog.records if r.levelname == "WARNING")
            text = record.getMessage()
            assert f"rank 1 connects in epoch {epoch} of this job, rank 0 is in epoch 7" in text
        train(transports)


def test_worlds_follow_each_other_at_the_same_ports(caplog: pytest.LogCaptureFixture) -> None:
    """What a rank of the world before sends late to the new one is closed unread."""
    caplog.set_level("DEBUG", "hvdlite")
    config = Config(tcp_ports=free_ports(2))
    late: list[Identity] = []
    ports = set()
    for epoch in range(3):
        world = TcpWorld(TWO_HOSTS, config, neighbours=rings, epoch=epoch, secret=b"s")
        transports = run_threads(2, world.transport)
        ports |= {t._connections._listeners[0].getsockname()[1] for t in transports}
        for old in late:
            caplog.clear()
            assert knock_on(transports[0], old.key, old.claim(Slot(0, DATA))) == b""
            assert "it does not know the secret of this job" in caplog.text
            assert not transports[0]._connections._guests
        train(transports)
        late.append(transports[1]._connections.me)
        run_threads(2, lambda rank, world=transports: world[rank].close())
    assert ports == {*config.tcp_ports}


def test_a_claim_that_is_changed_on_its_way_is_refused() -> None:
    me = Identity(1, 2, 0, b"k")
    claim = me.claim(Slot(0, DATA))
    assert Identity(0, 2, 0, b"k").read(claim) == Slot(1, DATA, 0)
    for position in range(CLAIM.size - 2):  # But for channel and stream, which the proof covers.
        changed = bytearray(claim)
        changed[position] ^= 1
        with pytest.raises(ProtocolError):
            Identity(0, 2, 0, b"k").read(bytes(changed))


@pytest.mark.parametrize("secret", [b"", b"s"])
def test_two_jobs_have_different_keys(secret: bytes) -> None:
    keys = set()
    for _ in range(2):
        with open_pair(secret=secret) as (transports, _):
            assert transports[0]._connections.me.key == transports[1]._connections.me.key
            keys.add(transports[0]._connections.me.key)
    assert len(keys) == 2


def test_ranks_with_different_secrets_do_not_connect() -> None:
    meeting = InProcessMeeting(2)

    def body(rank: int) -> None:
        with pytest.raises(HorovodInternalError, match=r"rank 1 .*cannot reach rank 0.*another"):
            connect(
                meeting.exchange(rank), Config(), time.monotonic() + 1, rings,
                host=f"h{rank}", secret=b"%d" % rank,
            )  # fmt: skip

    run_threads(2, body)


def make_room_for(guests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let so many connect that have not proved who they are, to each of two ranks."""
    strangers = guests - 2 * connections.CONNECTIONS_PER_RANK
    monkeypatch.setattr(connections, "MOST_STRANGERS", strangers)


def ports_of_guests(transport: TcpTransport) -> set[int]:
    """From where they connect that have not proved who they are."""
    return {guest.connection.getpeername()[1] for guest in transport._connections._guests}


def test_too_many_guests_push_out_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    make_room_for(3, monkeypatch)
    with open_pair() as (transports, places):
        strangers = [socket.create_connection(places[0]) for _ in range(10)]
        for _ in strangers:
            transports[0].receive(0.01)
        assert len(transports[0]._connections._guests) == 3
        train(transports)
        for stranger in strangers:
            stranger.close()


def test_a_rank_that_is_pushed_out_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    make_room_for(1, monkeypatch)
    with open_pair(neighbours=lambda topology, rank: ()) as (transports, places):
        strangers: list[socket.socket] = []
        transports[1].send(0, b"at last")
        for _ in range(3):
            while not ports_of_guests(transports[0]) - {s.getsockname()[1] for s in strangers}:
                transports[1].receive(0.02)  # Dials.
                transports[0].receive(0.02)  # Accepts.
            strangers.append(socket.create_connection(places[0]))
            while strangers[-1].getsockname()[1] not in ports_of_guests(transports[0]):
                transports[0].receive(0.02)
        got: list[list[Incoming]] = [[]]

        def go_on(rank: int) -> None:
            while not got[-1]:
                messages = transports[rank].receive(0.05)
                if rank == 0:
                    got.append(messages)

        run_threads(2, go_on)
        assert got[-1] == [Incoming(1, b"at last")]
        for stranger in strangers:
            stranger.close()


def test_a_rank_without_descriptors_accepts_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PAUSE_SECONDS", 0.1)
    with open_pair() as (transports, places):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        stranger = socket.create_connection(places[0])
        used = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
        fillers = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
        try:
            with suppress(OSError):
                while True:
                    fillers.append(os.dup(0))
            assert transports[0].receive(0.01) == []
            assert not transports[0]._connections._guests
        finally:
            for filler in fillers:
                os.close(filler)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        deadline = time.monotonic() + 10
        while not transports[0]._connections._guests and time.monotonic() < deadline:
            transports[0].receive(0.02)
        assert transports[0]._connections._guests
        stranger.close()


# -- ports


def free_ports(count: int) -> tuple[int, int]:
    """The first and the last of so many ports that are free now."""
    for first in range(20_000, 32_000, count):
        with suppress(OSError):
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
            return first, first + count - 1
    raise AssertionError("no ports are free")


def test_ranks_listen_within_the_range_of_ports() -> None:
    low, high = ports = free_ports(4)

    def main(transport: TcpTransport) -> int:
        exchange_arrays(transport)
        return int(transport._connections._listeners[-1].getsockname()[1])

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
    good = listeners.Interface("lo", "127.0.0.1", 8)
    gone = listeners.Interface("eth9", "203.0.113.7", 24)
    ((endpoint, listener),) = listeners.listen_remote([gone, good], (), 0)
    assert endpoint.address == listener.getsockname()[0] == "127.0.0.1"  # and not all addresses
    listener.close()
    with pytest.raises(HorovodInternalError, match=r"cannot listen on 203\.0\.113\.7"):
        listeners.listen_remote([gone], (), 0)


# -- networks


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


@pytest.mark.timeout(60)
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


# -- leaks


def open_files() -> int:
    """The number of descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.timeout(60)
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
        done = os.pipe()
        ready = os.pipe()
        child = os.fork()
        if child == 0:
            for transport in transports:
                transport.after_fork_in_child()
            os.write(ready[1], b"r")
            os.close(done[1])
            os.read(done[0], 1)  # Lives until the test is over.
            os._exit(0)
        try:
            os.read(ready[0], 1)
            train(transports)
            transports[1]._close_sockets()
            messages = transports[0].receive(10)
            assert messages == [Incoming(1, None)]
        finally:
            for end in (*done, *ready):
                os.close(end)
            os.waitpid(child, 0)


@pytest.mark.parametrize("honest", [False, True])
def test_who_listens_must_prove_itself_too(honest: bool) -> None:
    """An impostor at the address of a rank can send a nonce, and bytes of the right number."""
    me, slot, poller = Identity(1, 2, 0, b"key"), Slot(0, DATA), Poller()
    ended: list[str] = []

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            nonce = handshake.new_nonce()
            connection.sendall(nonce)
            said = connection.recv(16 + CLAIM.size + 32, socket.MSG_WAITALL)
            claim = said[16 : 16 + CLAIM.size]
            key = me.key if honest else b"guess"
            connection.sendall(handshake.proof(key, handshake.LISTENS, nonce + said[:16], claim))
            connection.recv(1)

    def connected(dial: Dial, connection: socket.socket, target: Target) -> None:
        connection.close()
        ended.append("yes")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = Target(socket.AF_INET, listener.getsockname())
        dial = Dial(poller, me, slot, [target], Limits(5, 5))
        dial.connected = connected
        dial.failed = lambda dial, reasons: ended.append(reasons)
        server = threading.Thread(target=answer, args=(listener,))
        server.start()
        dial.start()
        while not ended:
            poller.poll(10)
        server.join(10)
    poller.close()
    assert ended == ["yes"] if honest else "another job answers" in ended[0]
