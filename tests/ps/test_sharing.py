"""Payloads in memory that processes of one host share: who may look at what, and for how long."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.connections import prove
from hvdlite.common.connections.address import Address
from hvdlite.common.connections.loop import Loop
from hvdlite.ps.connections.channel import Listener
from hvdlite.ps.connections.client import Client
from hvdlite.ps.connections.connection import Connection
from hvdlite.ps.connections.messages import SERVER, Message
from hvdlite.ps.connections.shared_memory import (
    MAGIC,
    NOTE,
    SHARED_BYTES,
    Descriptor,
    SharedMemory,
    Sharing,
    Window,
    swap,
)
from hvdlite.ps.tables import updater as gradient_sums
from hvdlite.ps.tables.updater import add_up
from tests.ps.cluster import wait_until
from tests.ps.hostile import claim_with
from tests.ps.peers import break_off

FLOAT = np.dtype(np.float32)
SIZE = SHARED_BYTES  # Elements of a payload that is worth it.


def filled(memory: SharedMemory, value: float, size: int = SIZE) -> Any:
    array = memory.new(size, FLOAT)
    array[:] = value
    return array


def payload(array: Any) -> memoryview:
    view: memoryview = array.view(np.uint8).data
    return view


def window_of(memory: SharedMemory) -> Window:
    return Window(Descriptor(os.dup(memory.descriptor)), Descriptor(os.open("/dev/null", 0)))


@pytest.fixture
def pair() -> Iterator[tuple[SharedMemory, Sharing, Sharing]]:
    one, other = SharedMemory(), SharedMemory()
    windows = [window_of(memory) for memory in (one, other)]
    here, there = Sharing(one, windows[1]), Sharing(other, windows[0])
    yield one, here, there
    here.close(), there.close(), one.close(), other.close()


def test_memory_is_used_again_when_no_view_is_left_and_not_before() -> None:
    memory = SharedMemory()
    first = filled(memory, 1)
    view = first[10:].view(np.uint32)
    del first
    second = filled(memory, 2)
    assert (view.view(np.float32) == 1).all() and memory.nbytes == 2 * SIZE * 4
    del view, second
    kept = [filled(memory, 3), filled(memory, 4)]
    assert memory.nbytes == 2 * SIZE * 4 and kept[0][0] == 3
    memory.close()


def test_a_payload_is_a_place_and_its_memory_is_kept_until_the_peer_has_let_it_go(
    pair: tuple[SharedMemory, Sharing, Sharing],
) -> None:
    memory, here, there = pair
    sent = here.pack(Message("push", payloads=[payload(filled(memory, 1)), b"small"]))
    assert list(sent.payloads) == [b"small"]
    got = there.unpack(sent)
    assert NOTE not in got.body and got.payloads[1] == b"small"
    seen = np.frombuffer(got.payloads[0], np.float32)[7:]
    del got
    filled(memory, 2)  # It must not get the memory that is looked at.
    here.unpack(there.pack(Message("pushed")))
    filled(memory, 2)
    assert (seen == 1).all() and here.lent == 1
    del seen
    here.unpack(there.pack(Message("pushed")))
    assert here.lent == 0
    before = memory.nbytes
    kept = [filled(memory, 3), filled(memory, 3)]
    assert memory.nbytes == before and len(kept) == 2


def test_what_was_lent_stays_where_the_answer_that_lets_it_go_is_lost(
    pair: tuple[SharedMemory, Sharing, Sharing],
) -> None:
    memory, here, there = pair
    there.unpack(here.pack(Message("push", payloads=[payload(filled(memory, 1))])))
    there.pack(Message("pushed"))  # lost
    assert here.lent == 1
    here.unpack(there.pack(Message("pushed")))
    assert here.lent == 0


@pytest.mark.parametrize(
    "note", [[1, 0, [], [[0, 1 << 40]]], [1, 0, [], [None]], [1], [1, 0, [], [["a", 2]]]]
)
def test_places_that_are_none_are_refused(
    pair: tuple[SharedMemory, Sharing, Sharing], note: list[Any]
) -> None:
    with pytest.raises(ProtocolError):
        pair[2].unpack(Message("push", body={NOTE: note}))


def test_what_a_peer_has_said_before_it_went_is_dropped(
    pair: tuple[SharedMemory, Sharing, Sharing],
) -> None:
    memory, here, there = pair
    sent = here.pack(Message("push", payloads=[payload(filled(memory, 1))]))
    there.close()
    with pytest.raises(ProtocolError, match="has gone"):
        there.unpack(sent)


def test_memory_that_could_shrink_is_refused() -> None:
    descriptors = Descriptor(os.memfd_create("other")), Descriptor(os.open("/dev/null", 0))
    with pytest.raises(ProtocolError, match="could shrink"):
        Window(*descriptors)


class Echo:
    """A listener in a thread that answers what it gets with the same payloads, doubled."""

    def __init__(self) -> None:
        self.listener = Listener(Address("127.0.0.1"), SERVER)
        self.listener.open_memory()
        self.seen: list[tuple[Any, ...]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            received = self.listener.receive(0.05)
            if received is not None:
                self._answer(*received)
                del received  # Its payloads are views, too.

    def _answer(self, peer: bytes, message: Message) -> None:
        memory = self.listener.memory
        assert memory is not None
        arrays = [np.frombuffer(each, np.float32) for each in message.payloads]
        self.seen.append(tuple(float(each[-1]) for each in arrays))
        answers = [payload(memory.copy(each + each)) for each in arrays]
        self.listener.send(
            peer, Message("values", message.request, message.table, payloads=answers)
        )

    def close(self) -> None:
        self._ended.set()
        self._thread.join(10)
        self.listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.close()


class Asker:
    """A client that asks one listener."""

    def __init__(self, address: str) -> None:
        self.client = Client(b"asker %d" % os.getpid())
        self.connection: Connection = self.client.connect(address, SERVER)
        self.connection.receive = self._receive

    def _receive(self, message: Message) -> None:
        self._done(message)

    def shares(self, seconds: float = 10.0) -> bool:
        """Return whether memory is shared, soon."""
        met = threading.Event()

        def look() -> None:
            if self.connection.caller.sharing is not None:
                met.set()

        self.client.every(0.01, look)
        return met.wait(seconds)

    def ask(self, value: float) -> tuple[Any, bool]:
        """Return the answer, and whether it lies in shared memory."""
        sent = self.client.new(SIZE, FLOAT)
        sent[:] = value

        def ask(done: Any) -> None:
            self._done = done
            self.connection.send(Message("push", payloads=[payload(sent)]))

        handle = self.client.ask(ask)
        assert handle.ended_within(20)
        (answer,) = handle.wait().payloads
        return np.frombuffer(answer, np.float32), answer.readonly


def test_processes_of_a_host_share_memory_by_themselves(echo: Echo) -> None:
    asker = Asker(echo.listener.address)
    assert asker.shares()
    answers = [asker.ask(value) for value in (1.0, 2.0, 3.0)]
    assert [(each[0], near) for each, near in answers] == [(2, True), (4, True), (6, True)]
    assert all((each == each[0]).all() for each, _ in answers)
    assert asker.connection.caller.address.startswith("@")
    asker.client.close()


def test_a_peer_that_cannot_reach_the_memory_is_sent_the_bytes(echo: Echo) -> None:
    address, _, _ = echo.listener.address.partition(" ")
    for words in (address, f"{address} hvdlite-ps-of-another-host"):
        asker = Asker(words)
        answer, near = asker.ask(5.0)
        assert (answer == 10).all() and not near
        assert asker.connection.caller.address == address
        asker.client.close()


def test_memory_is_shared_anew_on_another_connection(echo: Echo) -> None:
    asker = Asker(echo.listener.address)
    assert asker.ask(5.0)[1]
    (name,) = echo.listener._peers
    asker.client.call(lambda: break_off(asker.connection.caller))
    answer, near = asker.ask(6.0)
    assert (answer == 12).all() and near
    assert [*echo.listener._peers] == [name]
    asker.client.close()


def _ask_and_wait(address: str, pipe: Pipe) -> None:
    asker = Asker(address)
    assert asker.shares()
    answer, _ = asker.ask(1.0)
    pipe.send(answer[0])
    pipe.recv()


def test_a_killed_process_gives_back_what_was_lent_to_it(echo: Echo) -> None:
    here, there = multiprocessing.Pipe()
    words = echo.listener.address, there
    process = multiprocessing.get_context("fork").Process(
        target=_ask_and_wait, args=words, daemon=True
    )
    process.start()
    assert here.recv() == 2
    memory = echo.listener.memory
    assert memory is not None
    (sharing,) = (peer.sharing for peer in echo.listener._peers.values())
    assert sharing is not None and sharing.lent == 1
    process.kill()
    process.join(10)
    wait_until(lambda: not echo.listener._peers and sharing.lent == 0)
    gc.collect()
    before = memory.nbytes
    assert filled(memory, 0)[0] == 0 and memory.nbytes == before


@pytest.mark.parametrize("words", [b"", b"hvdlips", b"what has no memory with it"])
def test_who_hands_over_no_memory_is_let_go(echo: Echo, words: bytes) -> None:
    """Though it has proved itself, as one that is broken."""
    name = echo.listener.address.partition(" ")[2]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as broken:
        broken.settimeout(20)
        broken.connect(f"\0{name}")
        broken.sendall(claim_with(broken, b"", "ps server", b"worker 0"))
        reply = prove.REPLY.size + prove.PROOF_BYTES
        assert broken.recv(reply, socket.MSG_WAITALL)[0] == prove.ACCEPTED
        broken.sendall(prove.GO + words)
        broken.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while broken.recv(100):
                pass
    asker = Asker(echo.listener.address)
    assert asker.ask(1.0)[0][0] == 2
    asker.client.close()


@pytest.mark.parametrize("sealed", [True, False])
def test_memory_that_is_not_sealed_is_not_mapped(sealed: bool) -> None:
    loop, memory = Loop(), SharedMemory()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    came: list[Sharing] = []
    failed: list[str] = []
    here.setblocking(False)
    swap(loop, here, memory, came.append, failed.append)
    other = SharedMemory() if sealed else None
    descriptor = os.memfd_create("other") if other is None else os.dup(other.descriptor)
    ends = os.pipe()
    socket.send_fds(there, [MAGIC], [descriptor, ends[1]])
    for number in (descriptor, *ends):
        os.close(number)
    while not came and not failed:
        loop.run_once(20)
    assert (len(came), len(failed)) == ((1, 0) if sealed else (0, 1))
    assert sealed or "could shrink" in failed[0]
    for each in (*came, here, there, memory, *([other] if other else [])):
        each.close()
    loop.close()


def test_what_was_lent_stays_as_long_as_a_living_peer_looks_at_it(echo: Echo) -> None:
    """Though the connection has ended over which it was lent."""
    asker, memory = Asker(echo.listener.address), echo.listener.memory
    assert memory is not None
    answer, near = asker.ask(5.0)
    assert near
    (sharing,) = (peer.sharing for peer in echo.listener._peers.values())
    assert sharing is not None
    asker.client.call(lambda: break_off(asker.connection.caller))
    assert asker.ask(6.0)[0][0] == 12  # By another connection: the first one has ended.
    kept = [filled(memory, 7) for _ in range(4)]
    assert (answer == 10).all() and sharing.lent == 1 and len(kept) == 4
    del answer
    wait_until(lambda: sharing.lent == 0)
    asker.client.close()


def test_where_memory_cannot_be_handed_over_all_bytes_are_sent(echo: Echo) -> None:
    memory = echo.listener.memory
    assert memory is not None
    open_memory = os.memfd_create("not sealed")
    os.dup2(open_memory, memory.descriptor)
    os.close(open_memory)
    asker = Asker(echo.listener.address)
    answer, near = asker.ask(5.0)
    assert (answer == 10).all() and not near
    assert asker.connection.caller.address == echo.listener.address.partition(" ")[0]
    assert "could shrink" in asker.connection.caller.trouble
    asker.client.close()


def test_nothing_lies_in_the_file_system(echo: Echo) -> None:
    def memory() -> set[str]:
        """What both ends have mapped of it: others make files there, too."""
        return {*re.findall(r"/dev/shm/.*", Path("/proc/self/maps").read_text())}

    before = memory()
    asker = Asker(echo.listener.address)
    assert asker.shares() and asker.ask(1.0)[1]
    assert memory() == before
    asker.client.close()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", ml_dtypes.bfloat16, "int32", "int64"]
)
def test_sums_are_those_of_numpy_in_rank_order(
    dtype: Any, average: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(gradient_sums, "_kernel", lambda: None)
    random = np.random.default_rng(1)
    for count in (1, 2, 3, 5):
        given = [(random.normal(size=999) * 50).astype(dtype) for _ in range(count)]
        wide = np.dtype(np.float32) if given[0].itemsize == 2 else given[0].dtype
        wanted = given[0].astype(wide)
        for each in given[1:]:
            wanted = wanted + each.astype(wide)
        if average and count > 1:
            wanted = wanted // count if wide.kind == "i" else wanted * wide.type(1 / count)
        into = np.empty_like(given[0])
        assert add_up(given, average=average, into=into) is into
        assert into.tobytes() == wanted.astype(dtype).tobytes()


def test_small_payloads_stay_in_the_message() -> None:
    memory = SharedMemory()
    small = memory.new(10, FLOAT)
    assert memory.nbytes == 0 and memory.find(payload(small)) is None
    memory.close()
