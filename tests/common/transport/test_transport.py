"""Transports: messages, wake-ups, signals, shared memory, arrays, and how connections end."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlite.common.base.errors import HorovodInternalError, PeerLostError, ProtocolError
from hvdlite.common.base.topology import Topology
from hvdlite.common.transport.base import Incoming, do_nothing
from hvdlite.common.transport.framing import HEADER, MAGIC, Assembler, frames
from hvdlite.common.transport.inprocess import InProcessTransport, InProcessWorld
from hvdlite.common.transport.local import LocalMesh, create_memory
from hvdlite.common.transport.mpi_messages import Backoff
from hvdlite.common.transport.rendezvous import MeetingFolder, listen, meet
from tests.common.children import living_child
from tests.limits import HANG_SECONDS
from tests.ranks import run_threads
from tests.worlds import TCP, TcpWorld

pytestmark = pytest.mark.timeout(20)


class MeshTransport:
    """A `LocalMesh` with the call forms of a `Transport`, so that both run the same tests."""

    def __init__(self, rank: int, mesh: LocalMesh) -> None:
        self.rank = rank
        self.mesh = mesh
        self.negotiate: Callable[[], None] = do_nothing
        self.send, self.wake, self.shared = mesh.send, mesh.wake, mesh.shared
        self.signal, self.close = mesh.signal, mesh.close

    def call_while_waiting(self, negotiate: Callable[[], None]) -> None:
        """See `Transport.call_while_waiting`."""
        self.negotiate = negotiate

    def receive(self, timeout: float | None) -> list[Incoming]:
        """See `Transport.receive`: sleeps as often as it takes."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            messages = self.mesh.receive(left)
            if messages or self.mesh.woken or left == 0:
                self.mesh.woken = False
                return messages

    def await_signal(self, rank: int) -> None:
        """See `Transport.await_signal`."""
        self.mesh.await_signal(rank, self.negotiate)


def make_meshes(size: int) -> list[LocalMesh]:
    """The meshes of all ranks of a host."""
    meeting = MeetingFolder.new()
    listeners = [listen(meeting, rank) for rank in range(size)]
    deadline = time.monotonic() + 10

    def join(rank: int) -> LocalMesh:
        peers = tuple(peer for peer in range(size) if peer != rank)
        memory = create_memory()
        return LocalMesh(
            rank, meet(meeting, listeners[rank], rank, peers, memory, deadline), memory
        )

    with ThreadPoolExecutor(size) as pool:
        meshes = list(pool.map(join, range(size)))
    meeting.close()
    return meshes


ONE_HOST, THREE_HOSTS = Topology.single_host(3), Topology(((0,), (1,), (2,)))


def make_transports(kind: str, topology: Topology) -> list[Any]:
    """The transports of all ranks; each is connected with all others."""
    if kind == "sockets":
        return [MeshTransport(rank, mesh) for rank, mesh in enumerate(make_meshes(topology.size))]
    if kind == TCP:
        everyone = range(topology.size)
        return run_threads(topology.size, TcpWorld(topology, neighbours=all_of(everyone)).transport)
    world = InProcessWorld(topology)
    return [world.transport(rank) for rank in range(topology.size)]


def all_of(ranks: Sequence[int]) -> Callable[[Topology, int], list[int]]:
    """Neighbours of a rank: all others."""
    return lambda topology, rank: [other for other in ranks if other != rank]


@contextmanager
def opened(kind: str, topology: Topology) -> Iterator[list[Any]]:
    """The transports, which are closed at the end."""
    with ExitStack() as stack:
        transports = make_transports(kind, topology)
        for transport in transports:
            stack.callback(lambda t=transport: close_once(t))
        yield transports


@pytest.fixture(params=["in process", "sockets", TCP])
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Three ranks of one host."""
    with opened(request.param, ONE_HOST) as transports:
        yield transports


@pytest.fixture(params=["in process", "sockets", TCP, "between hosts"])
def anywhere(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Three ranks of one host, or of three."""
    far = request.param == "between hosts"
    with opened(TCP if far else request.param, THREE_HOSTS if far else ONE_HOST) as transports:
        yield transports


def close_once(transport: Any) -> None:
    """Close unless the test did."""
    with suppress(OSError):
        transport.close()


def collect(transport: Any, count: int) -> list[Incoming]:
    """The next `count` messages, or fewer after ten seconds without any."""
    messages: list[Incoming] = []
    while len(messages) < count and (more := transport.receive(10.0)):
        messages += more
    return messages


def test_messages_keep_their_borders_and_order(anywhere: list[Any]) -> None:
    bodies = [b"", b"a", b"bc" * 100_000, b"d", bytes(65536), b"e" * 65520, b"f" * 65521]
    sender = threading.Thread(target=lambda: [anywhere[0].send(1, body) for body in bodies])
    sender.start()
    sender.join()
    progress = threading.Thread(target=lambda: anywhere[0].receive(5.0))  # flushes what is queued
    progress.start()
    assert collect(anywhere[1], len(bodies)) == [Incoming(0, body) for body in bodies]
    anywhere[0].wake()
    progress.join()


def test_two_ranks_that_send_much_to_each_other_do_not_deadlock(anywhere: list[Any]) -> None:
    bodies = [bytes([index]) * 100_000 for index in range(40)]
    finished = [threading.Event(), threading.Event()]

    def talk(me: int, other: int) -> list[Incoming]:
        for body in bodies:
            anywhere[me].send(other, body)
        messages = collect(anywhere[me], len(bodies))
        finished[me].set()
        while not finished[other].is_set():
            anywhere[me].receive(0.01)  # goes on sending, as an engine does
        return messages

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(talk, (0, 1), (1, 0)))
    for other, got in zip((1, 0), results, strict=True):
        assert got == [Incoming(other, body) for body in bodies]


def test_wake_ends_a_receive_without_end(anywhere: list[Any]) -> None:
    anywhere[0].wake()
    assert anywhere[0].receive(None) == []  # the wake came first
    waker = threading.Thread(target=anywhere[0].wake)
    waker.start()
    assert anywhere[0].receive(None) == []  # or it comes meanwhile
    waker.join()


def test_a_receive_ends_after_its_time(anywhere: list[Any]) -> None:
    assert anywhere[0].receive(0) == []
    assert anywhere[0].receive(0.01) == []


def test_signals_are_counted_and_carry_memory(ranks: list[Any]) -> None:
    mine = ranks[0].shared(0, 100)
    for value in (1, 2, 3):
        mine[:] = value
        ranks[0].signal([1, 2])
    for rank in (1, 2):
        for _ in range(3):
            ranks[rank].await_signal(0)
        assert ranks[rank].shared(0, 100).tolist() == [3] * 100
    ranks[1].shared(0, 100)[5] = 9  # a peer may write
    ranks[1].signal([0])
    ranks[0].await_signal(1)
    assert ranks[0].shared(0, 100)[5] == 9


def test_more_signals_than_a_socket_holds(ranks: list[Any]) -> None:
    count = 5000
    with ThreadPoolExecutor(2) as pool:
        for _ in range(count):
            ranks[0].signal([1])
        taker = pool.submit(lambda: [ranks[1].await_signal(0) for _ in range(count)])
        pool.submit(lambda: ranks[0].await_signal(1))  # pays the tokens that are owed
        taker.result(30)
        ranks[1].signal([0])


def test_memory_grows_and_keeps_its_contents(ranks: list[Any]) -> None:
    ranks[0].shared(0, 10)[:] = 7
    ranks[0].signal([1])
    ranks[1].await_signal(0)
    assert ranks[1].shared(0, 10).sum() == 70
    ranks[0].shared(0, 100_000)[99_999] = 1
    ranks[0].signal([1])
    ranks[1].await_signal(0)
    grown = ranks[1].shared(0, 100_000)
    assert grown[:10].sum() == 70
    assert grown[99_999] == 1
    with pytest.raises(ProtocolError, match="rank 0"):
        ranks[1].shared(0, 10_000_000)  # only the owner makes it grow


def test_the_end_of_a_connection_follows_its_last_message(ranks: list[Any]) -> None:
    ranks[0].send(1, b"last")
    ranks[0].close()
    assert collect(ranks[1], 2) == [Incoming(0, b"last"), Incoming(0, None)]
    ranks[1].send(0, b"nobody hears this")
    assert ranks[1].receive(0) == []  # told once
    with pytest.raises(PeerLostError, match="rank 0") as caught:
        ranks[1].await_signal(0)
    assert caught.value.rank == 0
    ranks[1].send(2, b"others live")
    assert Incoming(1, b"others live") in collect(ranks[2], 2)


def test_what_is_queued_goes_before_a_rank_closes() -> None:
    """The message is larger than a socket, so that most of it waits when the rank ends."""
    one, other = make_meshes(2)
    body = os.urandom(4 << 20)
    one.send(1, body)

    def main(rank: int) -> Any:
        if rank == 0:
            one.drain(HANG_SECONDS)
            return one.close()
        came: list[Incoming] = []
        while not came:
            came = other.receive(HANG_SECONDS)
        other.close()
        return came[0].body == body

    assert run_threads(2, main) == [None, True]


def test_a_peer_that_leaves_during_a_wait_ends_it(ranks: list[Any]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks[1].await_signal, 0)
        ranks[0].close()
        with pytest.raises(PeerLostError):
            waiting.result(10)


def test_a_wait_asks_check(ranks: list[Any]) -> None:
    def fail() -> None:
        raise HorovodInternalError("rank 2 reported a failure")

    ranks[1].call_while_waiting(fail)
    with pytest.raises(HorovodInternalError, match="rank 2 reported"):
        ranks[1].await_signal(0)


def test_a_message_to_a_rank_that_is_no_neighbour_arrives() -> None:
    world = TcpWorld(THREE_HOSTS, neighbours=lambda topology, rank: [])

    def main(rank: int) -> list[Incoming]:
        transport = world.transport(rank)
        for other in {0, 1, 2} - {rank}:
            transport.send(other, b"%d" % rank)
        messages = collect(transport, 2)
        heard[rank].set()
        while not all(event.is_set() for event in heard):
            transport.receive(0.01)  # Goes on sending, as an engine does.
        transport.close()
        return sorted(messages)

    heard = [threading.Event() for _ in range(3)]
    results = run_threads(3, main)
    for rank, got in enumerate(results):
        assert got == [Incoming(other, b"%d" % other) for other in sorted({0, 1, 2} - {rank})]


def test_the_end_of_a_far_connection_follows_its_last_message() -> None:
    with opened(TCP, THREE_HOSTS) as ranks:
        ranks[0].send(1, bytes(3_000_000))
        closing = threading.Thread(target=ranks[0].close)
        closing.start()
        assert collect(ranks[1], 2) == [Incoming(0, bytes(3_000_000)), Incoming(0, None)]
        closing.join(10)
        ranks[1].send(0, b"nobody hears this")
        assert ranks[1].receive(0) == []  # told once
        ranks[1].send(2, b"others live")
        assert Incoming(1, b"others live") in collect(ranks[2], 2)


# -- arrays (over MPI: tests/parallel)


@pytest.fixture(params=["in process", TCP, "between hosts"])
def pair(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Two ranks."""
    far = request.param == "between hosts"
    topology = Topology(((0,), (1,))) if far else Topology.single_host(2)
    with opened(TCP if far else request.param, topology) as transports:
        yield transports


def at_once(*actions: Callable[[], Any]) -> list[Any]:
    """The results of `actions`, each in a thread, as ranks run."""
    return run_threads(len(actions), lambda rank: actions[rank]())


def test_arrays_of_all_sizes_arrive_in_order(pair: list[Any]) -> None:
    random = np.random.default_rng(1)
    sizes = [1, 0, 5, 70_000, 3, 1_500_000, 0, 64 << 10, 1 << 20, (1 << 20) + 1, 9_000_001, 2]
    arrays = [random.integers(0, 256, size).astype(np.uint8) for size in sizes]

    def exchange(rank: int) -> list[Any]:
        targets = [np.zeros_like(array) for array in arrays]
        transport, other = pair[rank], 1 - rank
        receives = [transport.irecv(other, target) for target in targets]
        sends = [transport.isend(other, array) for array in arrays]
        transport.wait([*reversed(receives), *sends])
        assert all(pending.done() for pending in (*receives, *sends))
        return targets

    for targets in at_once(lambda: exchange(0), lambda: exchange(1)):
        for target, array in zip(targets, arrays, strict=True):
            np.testing.assert_array_equal(target, array)


def test_a_wait_for_any_array_ends_with_the_first(pair: list[Any]) -> None:
    first, never = np.zeros(3), np.zeros(3)

    def receive() -> list[bool]:
        receives = [pair[1].irecv(0, first), pair[1].irecv(0, never)]
        pair[1].wait_for_any(receives[::-1])
        done = [receive.done() for receive in receives]
        pair[1].send(0, b"go")
        with pytest.raises(PeerLostError, match="rank 0"):
            pair[1].wait_for_any(receives[1:])
        return done

    def send() -> None:
        pair[0].wait([pair[0].isend(1, np.ones(3))])
        assert collect(pair[0], 1)
        pair[0].close()

    assert at_once(send, receive)[1] == [True, False]
    np.testing.assert_array_equal(first, np.ones(3))


@pytest.mark.parametrize("connected", [False, True])
def test_a_peer_that_leaves_ends_a_wait_for_its_array(pair: list[Any], connected: bool) -> None:
    def send() -> None:
        if connected:
            pair[1].wait([pair[1].isend(0, np.ones(4))])
        pair[1].close()

    def receive() -> None:
        if connected:
            pair[0].wait([pair[0].irecv(1, np.zeros(4))])
        with pytest.raises(PeerLostError, match="rank 1") as caught:
            pair[0].wait([pair[0].irecv(1, np.zeros(4))])
        assert caught.value.rank == 1

    at_once(receive, send)


def test_a_wait_for_an_array_asks_check(pair: list[Any]) -> None:
    def fail() -> None:
        raise HorovodInternalError("rank 2 reported a failure")

    pair[0].call_while_waiting(fail)
    with pytest.raises(HorovodInternalError, match="rank 2 reported"):
        pair[0].wait([pair[0].irecv(1, np.zeros(4))])


@pytest.mark.parametrize("during", ["receive", "a wait for an array", "a wait for a signal"])
def test_a_rank_that_is_closed_by_another_thread_does_not_hang(
    pair: list[Any], during: str
) -> None:
    """As a test, or the end of a program, closes the connections of an engine that goes on."""
    sleeps = threading.Event()
    pair[0].call_while_waiting(sleeps.set)

    def wait() -> None:
        if during == "receive":
            sleeps.set()
            pair[0].receive(None)
        elif during == "a wait for an array":
            pair[0].wait([pair[0].irecv(1, np.zeros(4))])
        else:
            pair[0].await_signal(1)

    def close() -> None:
        assert sleeps.wait(10)
        pair[0].close()
        assert Incoming(0, None) in collect(pair[1], 1)

    if during == "a wait for a signal" and len(pair[0].topology.hosts) > 1:
        pytest.skip("signals are sent inside a host")
    if during == "receive" and isinstance(pair[0], InProcessTransport):
        pytest.skip("its messages still arrive")
    with pytest.raises(HorovodInternalError):
        at_once(wait, close)


def test_a_send_is_done_when_it_was_received() -> None:
    world = InProcessWorld(Topology.single_host(2))
    first, second = world.transport(0), world.transport(1)
    send = first.isend(1, np.ones(3))
    assert not send.done()
    second.close()
    with pytest.raises(PeerLostError, match="rank 1"):
        first.wait([send])


def test_an_array_of_another_size_is_refused(pair: list[Any]) -> None:
    first, second = pair

    def send() -> None:
        with suppress(PeerLostError):
            first.wait([first.isend(1, np.ones(3))])

    def receive() -> None:
        with pytest.raises(ProtocolError, match="24 bytes to rank 1, which expected 32"):
            second.wait([second.irecv(0, np.ones(4))])
        second.close()

    at_once(send, receive)


# -- strangers


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        HEADER.pack(MAGIC + 1, 1, 1) + b"x",
        HEADER.pack(MAGIC, 2, 2) + b"x",
        HEADER.pack(MAGIC, 1, 0) + b"x",
        HEADER.pack(MAGIC, 1, 1 << 62) + b"x",
        HEADER.pack(MAGIC, 0, 5),
    ],
)
def test_a_frame_that_we_cannot_have_sent(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="rank 3 sent"):
        Assembler(3).add(frame)


def test_frames_out_of_order() -> None:
    first, _, third = frames(bytes(150_000))
    assembler = Assembler(3)
    assert assembler.add(first) is None
    with pytest.raises(ProtocolError, match="out of order"):
        assembler.add(third)


def test_a_broken_frame_on_a_socket_is_refused() -> None:
    first, second = make_meshes(2)
    first._links[1].control.send(b"what a frame is not")
    with pytest.raises(ProtocolError, match="rank 0 sent"):
        second.receive(10.0)
    first._links[1].signal.send(b"xx")
    with pytest.raises(ProtocolError, match="foreign signal"):
        second.await_signal(0, do_nothing)
    first.close()
    second.close()


def test_a_stranger_at_the_meeting_is_refused() -> None:
    meeting = MeetingFolder.new()
    try:
        listener = listen(meeting, 0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(os.path.join(meeting.directory, "0"))
            stranger.send(b"hello")
            with pytest.raises(ProtocolError, match="stranger"):
                meet(meeting, listener, 0, (1,), 0, time.monotonic() + 10)
    finally:
        meeting.close()


def test_a_process_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = MeetingFolder.new()
    try:
        listener = listen(meeting, 0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(os.path.join(meeting.directory, "0"))
            real = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: real + 1)
            with pytest.raises(ProtocolError, match=f"user {real} tried to join"):
                meet(meeting, listener, 0, (1,), 0, time.monotonic() + 10)
    finally:
        meeting.close()


def test_a_rank_that_does_not_come_is_named() -> None:
    meeting = MeetingFolder.new()
    try:
        listener = listen(meeting, 0)
        with pytest.raises(HorovodInternalError, match="did not connect: 1, 2"):
            meet(meeting, listener, 0, (1, 2), 0, time.monotonic() + 0.01)
    finally:
        meeting.close()


def test_the_meeting_is_private_and_leaves_nothing() -> None:
    meeting = MeetingFolder.new()
    directory = Path(meeting.directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    listen(meeting, 0).close()
    meeting.close()
    assert not directory.exists()


def test_a_forked_child_does_not_hide_the_death_of_its_parent() -> None:
    first, second = make_meshes(2)
    with living_child(lambda: [each.after_fork_in_child() for each in (first, second)]):
        second.send(0, b"undisturbed")
        assert first.receive(10.0) == [Incoming(1, b"undisturbed")]
        second.close()
        assert first.receive(10.0) == [Incoming(1, None)]
        first.close()


def test_naps_are_short_in_a_busy_job_and_few_in_an_idle_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    backoff, looks = Backoff(), []
    while now < 1010.0:
        waited, seconds = now - 1000.0, backoff.seconds()
        assert seconds <= max(waited / 8, 20e-6), f"after {waited} s"
        looks.append((waited, seconds))
        now += seconds
    assert all(seconds <= 4e-3 for waited, seconds in looks if waited < 0.25)
    assert len(looks) < 1000  # in 10 s; at 0.1 ms each they take under 1 % of a core
