"""Messages and arrays over links: every cut of the bytes, limits, ends, beats, several threads."""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import pytest

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.connections.frames import BEAT, Frames, frame, pack
from hvdlite.common.connections.link import READ_BYTES, Link, Pipes
from hvdlite.common.connections.loop import Loop
from tests.common.connections.ends import VirtualLoop, run_until

pytestmark = pytest.mark.timeout(120)
MOST = 1 << 16


class End:
    """A link with all that it has heard."""

    def __init__(self, loop: Loop, connection: socket.socket | Pipes, **options: Any) -> None:
        self.messages: list[Any] = []
        self.arrays: list[list[bytes]] = []
        self.reasons: list[str] = []
        self.link = Link(
            loop,
            connection,
            received=self._received,
            ended=self.reasons.append,
            **{"most_bytes": MOST, **options},
        )

    def _received(self, message: Any, arrays: Sequence[bytearray | memoryview]) -> None:
        self.messages.append(message)
        self.arrays.append([bytes(each) for each in arrays])


def pair(loop: Loop, kind: str = "unix", **options: Any) -> tuple[End, End]:
    if kind == "pipes":
        (a_reads, b_writes), (b_reads, a_writes) = os.pipe(), os.pipe()
        ends: Sequence[Any] = (Pipes(a_reads, a_writes), Pipes(b_reads, b_writes))
    elif kind == "unix":
        ends = socket.socketpair()
    else:
        host = "::1" if kind == "ipv6" else "127.0.0.1"
        family = socket.AF_INET6 if kind == "ipv6" else socket.AF_INET
        with socket.create_server((host, 0), family=family) as listening:
            one = socket.create_connection(listening.getsockname()[:2])
            ends = one, listening.accept()[0]
    return End(loop, ends[0]), End(loop, ends[1], **options)


def memory(message: Any, sizes: list[int]) -> list[bytearray]:
    return [bytearray(size) for size in sizes]


@pytest.mark.parametrize("kind", ["unix", "tcp", "ipv6", "pipes"])
def test_messages_and_arrays_arrive_in_order(kind: str) -> None:
    loop = Loop()
    one, other = pair(loop, kind, memory=memory)
    large = np.random.default_rng(1).integers(0, 255, 5_000_003, np.uint8)
    sent: list[int] = []
    one.link.send("first", 1, "text \udc80", {2: None})
    one.link.send_head(
        pack(["second"]), [memoryview(large), b"", bytearray(b"abc")], lambda: sent.append(1)
    )
    one.link.send("third")
    other.link.send("back")
    run_until(loop, lambda: len(other.messages) == 3 and one.messages and sent)
    assert other.messages == [["first", 1, "text \udc80", {2: None}], ["second"], ["third"]]
    assert other.arrays == [[], [large.tobytes(), b"", b"abc"], []]
    assert one.link.queued_bytes == 0
    one.link.close()
    other.link.close()
    loop.close()


def test_arrays_are_received_into_the_memory_that_the_caller_gives() -> None:
    loop = Loop()
    table = np.zeros(100_000, np.float32)

    def own(message: Any, sizes: list[int]) -> list[memoryview]:
        assert (message, sizes) == (["push", "w"], [table.nbytes])
        return [memoryview(table).cast("B")]

    one, other = pair(loop, memory=own)
    values = np.arange(100_000, dtype=np.float32)
    one.link.send_head(pack(["push", "w"]), [memoryview(values).cast("B")])
    run_until(loop, lambda: other.messages)
    np.testing.assert_array_equal(table, values)
    one.link.close()
    other.link.close()


def test_every_cut_of_the_bytes_gives_the_same_messages() -> None:
    body = b"".join(
        [
            frame(pack(["a", 1])),
            BEAT,
            frame(pack(["b"]), [b"xyz", b"", b"12"]) + b"xyz12",
            frame(pack(["c"]), [b""]),
            frame(pack(["d"])),
        ]
    )
    expected = [["a", 1], ["b"], ["c"], ["d"]]
    for step in range(1, len(body) + 1):
        frames = Frames(100, memory)
        found = []
        for at in range(0, len(body), step):
            found += list(frames.add(body[at : at + step]))
        assert [message for message, _ in found] == expected
        assert [bytes(each) for each in found[1][1]] == [b"xyz", b"", b"12"]
        assert frames.between


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<II", MOST + 1, 0),
        struct.pack("<II", 0xFFFFFFFF, 0),
        struct.pack("<II", 10, 0xFFFFFFFE),
        struct.pack("<II", 10, 5000),
        struct.pack("<II", 1, 0) + b"\xc1",
        frame(b"\xa1x"),
        frame(msgpack.packb([])),
        frame(msgpack.packb([1])),
        frame(b"\x91" * 600),
        frame(pack(["x"]), [b"y"]),
    ],
)  # fmt: skip
def test_what_breaks_a_rule_ends_the_link(data: bytes) -> None:
    loop = Loop()
    raw, mine = socket.socketpair()
    end = End(loop, mine)
    raw.sendall(data)
    run_until(loop, lambda: end.reasons)
    assert not end.messages and end.reasons[0].startswith("it sent")
    assert raw.recv(1) == b""
    raw.close()


def test_a_huge_array_is_not_allocated_but_asked_for() -> None:
    def refuse(message: Any, sizes: list[int]) -> list[bytearray]:
        raise ProtocolError(f"{sizes[0]} bytes are too many")

    loop = Loop()
    raw, mine = socket.socketpair()
    end = End(loop, mine, memory=refuse)
    raw.sendall(struct.pack("<IIQ", len(pack(["x"])), 1, 1 << 62) + pack(["x"]))
    run_until(loop, lambda: end.reasons)
    assert end.reasons == [f"{1 << 62} bytes are too many"]
    raw.close()


@pytest.mark.parametrize(
    "half", [frame(pack(["a"]))[:-1], b"\1", frame(pack(["a"]), [b"xy"]) + b"x"]
)
def test_an_end_within_a_message_is_no_orderly_end(half: bytes) -> None:
    loop = Loop()
    raw, mine = socket.socketpair()
    end = End(loop, mine, memory=memory)
    raw.sendall(frame(pack(["whole"])) + half)
    raw.close()
    run_until(loop, lambda: end.reasons)
    assert end.messages == [["whole"]] and end.reasons == ["it ended in the middle of a message"]


@pytest.mark.parametrize("kind", ["unix", "tcp", "pipes"])
def test_finish_sends_all_that_is_queued_and_receives_on(kind: str) -> None:
    loop = Loop()
    one, other = pair(loop, kind, most_bytes=1 << 24)
    one.link.send("much", b"x" * 5_000_000)
    one.link.finish()
    one.link.send("too late")
    other.link.send("still heard")
    run_until(loop, lambda: other.reasons and one.reasons)
    assert len(other.messages) == 1 and len(other.messages[0][1]) == 5_000_000
    assert other.reasons == [""] and one.messages == [["still heard"]]


def test_leave_does_not_take_back_what_was_sent_last() -> None:
    loop = Loop()
    one, other = pair(loop, "tcp")
    other.link.send("unread")
    one.link.send("last")
    one.link.leave(5)
    run_until(loop, lambda: other.reasons)
    assert other.messages == [["last"]] and other.reasons == [""]
    run_until(loop, lambda: not one.link.open)
    assert not one.messages and not one.reasons


def test_leave_ends_after_its_time_where_the_other_end_does_not() -> None:
    loop = VirtualLoop()
    raw, mine = socket.socketpair()
    end = End(loop, mine)
    end.link.leave(5)
    loop.pass_time(4)
    assert end.link.open
    loop.pass_time(2)
    assert not end.link.open
    raw.close()


def test_beats_are_sent_in_silence_alone_and_show_life() -> None:
    loop = VirtualLoop()
    a, b = socket.socketpair()
    one, other = End(loop, a, beat_seconds=1), End(loop, b)
    for _ in range(20):
        loop.pass_time(0.5)
        one.link.send("talk")
    for _ in range(20):
        loop.pass_time(1)
        assert other.link.silent_for() <= 1
    assert len(other.messages) == 20
    one.link._beat_seconds = 1e9  # It hangs from now on.
    loop.pass_time(1)
    for _ in range(6):
        loop.pass_time(1)
    assert 6 <= other.link.silent_for() <= 7
    one.link.close()
    other.link.close()


def test_nobody_is_silent_while_this_end_stands_still() -> None:
    """As after a job was suspended, whose processes go on one after the other."""
    loop = VirtualLoop()
    raw, mine = socket.socketpair()
    end = End(loop, mine)
    for _ in range(3):
        loop.pass_time(1)
    loop.pass_time(1000)
    assert 3 <= end.link.silent_for() <= 5
    for _ in range(3):
        loop.pass_time(1)
    assert 6 <= end.link.silent_for() <= 8
    raw.close()
    end.link.close()


def test_several_threads_and_a_signal_handler_send_whole_messages() -> None:
    loop = Loop()
    one, other = pair(loop)
    count, threads = 300, 4
    filler = b"x" * 3000

    def talk(number: int) -> None:
        for each in range(count):
            one.link.send("from", number, each, filler)

    before = signal.signal(signal.SIGALRM, lambda *_: one.link.send("from", -1, 0, filler))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    workers = [threading.Thread(target=talk, args=(number,)) for number in range(threads)]
    try:
        for each in workers:
            each.start()
        run_until(
            loop,
            lambda: sum(m[1] >= 0 for m in other.messages) == threads * count,
        )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        for each in workers:
            each.join()
    for number in range(threads):
        mine = [message[2] for message in other.messages if message[1] == number]
        assert mine == list(range(count))
    one.link.close()
    other.link.close()


def test_a_message_may_be_sent_amid_another_one() -> None:
    """Signal handlers, and what runs in a garbage collection, come wherever memory is taken."""
    loop = Loop()
    one, other = pair(loop, memory=memory)
    count, often = 300, 1

    def interrupt(phase: str, _: object) -> None:
        if phase == "start":
            one.link.send("amid")

    before = gc.get_threshold()
    gc.callbacks.append(interrupt)
    gc.set_threshold(often)
    try:
        for number in range(count):
            one.link.gathers = bool(number % 10)
            one.link.send_head(pack(["x", number]), [bytearray(40_000), bytearray(8)])
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(interrupt)
    one.link.flush()
    run_until(loop, lambda: sum(kind == "x" for kind, *_ in other.messages) == count)
    assert [number for kind, *rest in other.messages for number in rest if kind == "x"] == [
        *range(count)
    ]
    assert len(other.messages) > count
    assert one.link.queued_bytes == 0
    one.link.close()
    other.link.close()


def test_memory_is_given_back_also_where_the_other_end_has_gone() -> None:
    loop = Loop()
    one, other = pair(loop)
    back: list[int] = []
    one.link.send_head(pack(["x"]), [bytes(10_000_000)], lambda: back.append(1))
    loop.run_once(0)
    assert not back
    other.link.close()
    run_until(loop, lambda: back)
    one.link.send_head(pack(["y"]), [b"z"], lambda: back.append(2))
    run_until(loop, lambda: len(back) == 2)
    assert one.reasons


def test_a_prologue_is_skipped_with_all_before_it() -> None:
    loop = Loop()
    raw, mine = socket.socketpair()
    end = End(loop, mine, prologue=b"\0begin\n")
    data = b"motd\0beg" * 1000 + b"\0begin\n" + frame(pack(["a"]))
    for at in range(0, len(data), 7):
        raw.sendall(data[at : at + 7])
        loop.run_once(0)
    run_until(loop, lambda: end.messages)
    assert end.messages == [["a"]]
    raw.close()
    end.link.close()


def test_a_message_may_close_the_link_that_brings_it() -> None:
    loop = Loop()
    raw, mine = socket.socketpair()
    heard: list[Any] = []
    link = Link(loop, mine, received=lambda m, _: (heard.append(m), link.close()),
                ended=heard.append, most_bytes=MOST)  # fmt: skip
    raw.sendall(frame(pack(["a"])) + frame(pack(["b"])))
    run_until(loop, lambda: heard)
    assert heard == [["a"]]
    raw.close()


def test_a_loop_runs_what_other_threads_post_and_timers_in_their_order() -> None:
    loop = Loop()
    order: list[str] = []
    loop.call_after(0.02, lambda: order.append("late"))
    loop.call_after(0.01, lambda: order.append("soon"))
    loop.call_after(0.015, lambda: order.append("never")).cancel()
    thread = threading.Thread(target=lambda: loop.post(lambda: order.append("posted")))
    thread.start()
    run_until(loop, lambda: len(order) == 3)
    thread.join()
    assert [each for each in order if each != "posted"] == ["soon", "late"]
    loop.close()


def test_a_timer_of_another_thread_ends_a_sleep() -> None:
    loop = Loop()
    loop.run_once(0)
    called = threading.Event()
    thread = threading.Thread(target=lambda: loop.call_after(0.01, called.set))
    thread.start()
    while not called.is_set():
        loop.run_once(30)
    thread.join()
    loop.close()


def test_a_forked_child_that_closes_its_copies_changes_nothing_for_its_parent() -> None:
    loop = Loop()
    one, other = pair(loop)
    if (child := os.fork()) == 0:
        loop.close()
        one.link.close()
        other.link.close()
        os._exit(0)
    os.waitpid(child, 0)
    one.link.send("on")
    run_until(loop, lambda: other.messages)
    one.link.close()
    other.link.close()


def test_a_forked_child_closes_its_copy_although_a_thread_held_the_lock() -> None:
    loop = Loop()
    a, b = pair(loop)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with a.link._lock:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    loop.close()  # As a child does first.
    closer = threading.Thread(target=a.link.close_after_fork, daemon=True)
    closer.start()
    closer.join(10.0)
    try:
        assert not closer.is_alive() and not a.link.open
        assert b.link._connection.recv(1) == b""
    finally:
        done.set()
        holder.join()
    b.link.close()


def test_all_that_waits_and_the_end_are_read_at_once() -> None:
    loop = Loop()
    a, b = pair(loop)
    count = 9
    for number in range(count):
        a.link.send("word", number, bytes(READ_BYTES // 4))
    assert a.link.queued_bytes == 0  # The socket has taken it.
    a.link.close()
    b.link.read_all()
    assert [message[1] for message in b.messages] == list(range(count))
    assert b.reasons == [""] and not b.link.open
    loop.close()


def test_an_end_of_pipes_forgets_no_descriptor_that_another_link_has_by_now() -> None:
    """The one that is written is closed first, and its number is free by then."""
    loop = Loop()
    old, old_peer = pair(loop, "pipes")
    written = old.link._writes
    old.link.finish()
    connection, other = socket.socketpair()
    if written not in (connection.fileno(), other.fileno()):  # Lower ones were free, too.
        os.dup2(connection.fileno(), written)
        connection.close()
        connection = socket.socket(fileno=written)
    new, new_peer = End(loop, connection), End(loop, other)
    old_peer.link.close()
    run_until(loop, lambda: old.reasons == [""])
    new.link.send("to the one")
    new_peer.link.send("to the other")
    run_until(loop, lambda: bool(new.messages and new_peer.messages))
    assert (new.messages, new_peer.messages) == ([["to the other"]], [["to the one"]])
    for end in (new, new_peer):
        end.link.close()
    loop.close()


def test_a_reset_that_a_send_has_met_is_the_reason_of_the_end() -> None:
    loop = Loop()
    one, other = pair(loop, "tcp")
    other.link._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.link.close()
    while one.link.says:  # The first that is sent may still be taken.
        one.link.send("word")
    run_until(loop, lambda: bool(one.reasons))
    assert one.reasons[0] in ("connection reset by peer", "broken pipe")
    loop.close()


def test_a_timer_of_a_signal_handler_ends_a_sleep() -> None:
    loop = Loop()
    called: list[int] = []

    def handle(*_: object) -> None:
        loop.call_after(0, lambda: called.append(1))

    before = signal.signal(signal.SIGUSR1, handle)
    sender = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
    sender.start()
    try:
        while not called:
            loop.run_once(None)
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
        loop.close()


def test_a_posted_call_that_raises_keeps_no_other_from_its_turn() -> None:
    loop = Loop()
    called: list[int] = []

    def fail() -> None:
        raise ValueError("this one")

    loop.post(fail)
    loop.post(lambda: called.append(2))
    with pytest.raises(ValueError, match="this one"):
        loop.run_once(1.0)
    run_until(loop, lambda: called == [2])
    loop.close()
