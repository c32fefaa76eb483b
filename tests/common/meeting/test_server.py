"""Meetings at a server: rounds, ranks that are late, wrong or lost, strangers, and attacks."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdlite.common.base.errors import HorovodInternalError, HorovodVersionMismatchError
from hvdlite.common.meeting import client as client_module
from hvdlite.common.meeting import doorway as doorway_module
from hvdlite.common.meeting import handshake, wire
from hvdlite.common.meeting import server as server_module
from hvdlite.common.meeting.address import Address, listen
from hvdlite.common.meeting.client import ServerExchange
from hvdlite.common.meeting.detection import detect
from hvdlite.common.meeting.meet import meet as meet_at
from hvdlite.common.meeting.rounds import Key
from hvdlite.common.meeting.server import MeetingServer
from hvdlite.common.meeting.serving import ServedMeeting
from tests.common.meeting.exchanges import all_sockets_closed, at_server, hosting
from tests.launcher.descriptors import no_free_descriptor
from tests.ranks import run_threads

SECRET = b"only this job knows it"
LIMIT = 20.0  # Seconds; a test that is well takes a fraction of one.


def soon(seconds: float = LIMIT) -> float:
    return time.monotonic() + seconds


def port_of(listener: socket.socket) -> Address:
    host, port, *_ = listener.getsockname()
    return Address(host, port)


class Driver:
    """A server in a thread of its own, as the launcher and its agents run one."""

    def __init__(self, make: Callable[[], MeetingServer]) -> None:
        self.lock = threading.Lock()
        self.server = make()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.001):
            with self.lock:
                self.server.handle()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.server.close()


@contextlib.contextmanager
def serving(size: int, secret: bytes = SECRET, **options: Any) -> Iterator[tuple[Address, Driver]]:
    listener = listen(Address("127.0.0.1", 0))
    address = port_of(listener)
    ranks = options.pop("ranks", range(size))
    driver = Driver(lambda: MeetingServer(listener, ranks, size, secret, **options))
    try:
        yield address, driver
    finally:
        driver.close()


def meet(exchange: Any, rounds: int = 3) -> list[list[bytes]]:
    try:
        return [exchange.allgather(f"{r} of {exchange.rank}".encode()) for r in range(rounds)]
    finally:
        exchange.close()


def expected(size: int, rounds: int = 3) -> list[list[bytes]]:
    return [[f"{r} of {rank}".encode() for rank in range(size)] for r in range(rounds)]


# -- meetings that go well


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_rank_gets_every_body_in_rank_order(size: int) -> None:
    with serving(size) as (address, _):
        results = run_threads(
            size, lambda rank: meet(at_server(address, rank, size, SECRET, soon()))
        )
    assert results == [expected(size)] * size


def test_a_unix_socket_with_a_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    address = f"unix:{folder}/meeting"
    driver = Driver(
        lambda: MeetingServer(listen(Address(path=f"{folder}/meeting")), range(2), 2, SECRET)
    )
    try:
        results = run_threads(2, lambda rank: meet(at_server(address, rank, 2, SECRET, soon())))
    finally:
        driver.close()
    assert results == [expected(2)] * 2


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


def test_a_thousand_meetings_one_after_the_other() -> None:
    def rank_main(rank: int) -> None:
        for _ in range(1000):
            assert meet(at_server(address, rank, 2, SECRET, soon()), 1) == expected(2, 1)

    with serving(2) as (address, driver):
        run_threads(2, rank_main)
        assert not driver.server.notes()


def test_a_thousand_meetings_that_rank_0_serves() -> None:
    listeners = [listen(Address("127.0.0.1", 0))]
    address = port_of(listeners[0])

    def rank_main(rank: int) -> None:
        for _ in range(300):
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
                driver.server.deliver(key, answer)

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
                driver.server.note_missing((), [1, 3])
        with pytest.raises(HorovodInternalError) as raised:
            meet(at_server(address, 0, 5, SECRET, soon(0.3)))
    known = "1, 3 (seen: 0, 2, 4)" if told else "1 (seen on this host: 0)"
    assert f"these ranks did not come: {known}" in str(raised.value)


# -- ranks that are late or lost


def test_the_server_may_come_later_and_its_name_may_resolve_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = listen(Address("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    failures = 3
    resolve = socket.getaddrinfo

    def resolve_later(host: str, *args: Any, **options: Any) -> Any:
        nonlocal failures
        if host != "job-0.service.invalid":
            return resolve(host, *args, **options)
        failures -= 1
        if failures >= 0:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1", *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_later)

    def rank_main(rank: int) -> Any:
        if rank == 0:
            while failures >= 0:
                time.sleep(0.001)
            return meet(hosting(listen(Address("127.0.0.1", port)), 0, 2, SECRET, soon()))
        return meet(at_server(f"job-0.service.invalid:{port}", 1, 2, SECRET, soon()))

    assert run_threads(2, rank_main) == [expected(2)] * 2


def test_nobody_who_listens_is_named_with_the_cause_at_the_deadline() -> None:
    listener = listen(Address("127.0.0.1", 0))
    address = port_of(listener)
    listener.close()
    with pytest.raises(HorovodInternalError) as raised:
        at_server(address, 1, 2, SECRET, soon(0.3))
    assert f"the server of the meeting at {address} cannot be reached" in str(raised.value)
    assert "Connection refused" in str(raised.value)
    assert "HVDLITE_START_TIMEOUT (seconds)" in str(raised.value)


@pytest.mark.parametrize(
    ("variables", "cause"),
    [
        ("HVDLITE_RANK=1 HVDLITE_SIZE=2 HVDLITE_RENDEZVOUS=%s", "HVDLITE_RENDEZVOUS"),
        ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=%s MASTER_PORT=%s", "MASTER_ADDR"),
    ],
)
def test_who_waits_for_rank_0_knows_that_it_listens(variables: str, cause: str) -> None:
    listener = listen(Address("127.0.0.1", 0))
    host, port = port_of(listener)[:2]
    listener.close()
    where = (host, port) if "PORT" in variables else f"{host}:{port}"
    launch = detect(dict(each.split("=") for each in (variables % where).split()))
    with pytest.raises(HorovodInternalError) as raised:
        meet_at(launch, None, SECRET, soon(0.3))
    sentence = (
        f"cannot be reached ([Errno 111] Connection refused): rank 0 listens there ({cause} says "
        "where), and has not started, or has not called init() yet"
    )
    assert sentence in str(raised.value)


def test_a_program_that_says_nothing_may_own_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ATTEMPT_SECONDS", 0.1)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(HorovodInternalError, match=r"\(timed out\): another program may own"),
    ):
        at_server(Address("127.0.0.1", silent.getsockname()[1]), 1, 2, SECRET, soon(0.4))


@pytest.mark.parametrize("hosted", [False, True])
def test_a_rank_that_never_comes_is_named_by_all_others(
    hosted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    listener = listen(Address("127.0.0.1", 0))
    address = port_of(listener)
    driver = None if hosted else Driver(lambda: MeetingServer(listener, range(4), 4, SECRET))

    def rank_main(rank: int) -> str:
        deadline = soon(1.5 if rank == 0 else 2.0) if hosted else soon(1.5)
        with pytest.raises(HorovodInternalError) as raised:
            if hosted and rank == 0:
                meet(hosting(listener, 0, 4, SECRET, deadline))
            else:
                meet(at_server(address, rank, 4, SECRET, deadline))
        return str(raised.value)

    with caplog.at_level(logging.WARNING, "hvdlite"):
        errors = run_threads(3, rank_main)
    if driver is not None:
        driver.close()
    for error in errors:
        assert "these ranks did not come: 3 (seen: 0, 1, 2)" in error, error
    assert "rank 0 of 4 has waited" in errors[0] and "HVDLITE_START_TIMEOUT" in errors[0]
    lines = [record.getMessage() for record in caplog.records]
    lines = [line for line in lines if "ended before" not in line]
    assert lines and all("rank 0 of 4 has waited" in line for line in lines), lines
    assert any("these ranks did not come: 3 (seen: 0, 1, 2)" in line for line in lines), lines


def test_who_has_time_waits_for_the_next_meeting_when_rank_0_gives_up() -> None:
    """Rank 1 has come when the time of rank 0 was nearly over, and meets it when it comes again."""
    first = listen(Address("127.0.0.1", 0))
    address = port_of(first)
    gave_up = threading.Event()

    def rank_main(rank: int) -> Any:
        if rank == 1:
            return meet(at_server(address, 1, 3, SECRET, soon()))
        if rank == 2:
            assert gave_up.wait(LIMIT)
            return meet(at_server(address, 2, 3, SECRET, soon()))
        exchange = hosting(first, 0, 3, SECRET, soon(0.5))
        with pytest.raises(HorovodInternalError, match=r"did not come: 2 \(seen: 0, 1\)"):
            meet(exchange)
        gave_up.set()
        return meet(hosting(listen(address), 0, 3, SECRET, soon()))

    assert run_threads(3, rank_main) == [expected(3)] * 3


def test_who_was_answered_fails_when_rank_0_gives_up_later() -> None:
    listener = listen(Address("127.0.0.1", 0))
    address = port_of(listener)
    over = threading.Barrier(3)

    def rank_main(rank: int) -> None:
        exchange: Any = (
            at_server(address, rank, 3, SECRET, soon())
            if rank
            else hosting(listener, 0, 3, SECRET, soon(1.0))
        )
        exchange.allgather(b"")
        began = time.monotonic()
        if rank < 2:
            with pytest.raises(HorovodInternalError, match=r"did not come: 2 \(seen: 0, 1\)"):
                exchange.allgather(b"")
            assert time.monotonic() - began < LIMIT / 2
        over.wait(LIMIT)
        exchange.close()

    run_threads(3, rank_main)


def test_who_gave_up_can_come_again_and_meet_who_was_late() -> None:
    gave_up = threading.Barrier(3)  # Both have: the first attempt of one may meet no second.

    def rank_main(rank: int) -> Any:
        if rank != 2:
            with pytest.raises(HorovodInternalError, match="did not come: 2 "):
                meet(at_server(address, rank, 3, SECRET, soon(0.3)))
        gave_up.wait(LIMIT)
        return meet(at_server(address, rank, 3, SECRET, soon()))

    with serving(3) as (address, _):
        assert run_threads(3, rank_main) == [expected(3)] * 3


@pytest.mark.parametrize("hosted", [False, True])
def test_a_rank_that_is_lost_in_the_middle_ends_the_wait_of_the_others(hosted: bool) -> None:
    listener = listen(Address("127.0.0.1", 0))
    address = port_of(listener)
    driver = None if hosted else Driver(lambda: MeetingServer(listener, range(3), 3, SECRET))

    def rank_main(rank: int) -> None:
        exchange: Any
        if rank == 0 and hosted:
            exchange = hosting(listener, 0, 3, SECRET, soon())
        else:
            exchange = at_server(address, rank, 3, SECRET, soon())
        exchange.allgather(b"")
        if rank == 2:
            exchange._connection.close()  # As the end of its process does.
            exchange._connection = None
            return
        began = time.monotonic()
        with pytest.raises(HorovodInternalError, match="rank 2 has left") as raised:
            exchange.allgather(b"")
        assert raised.value.rank == 2 and time.monotonic() - began < 5
        exchange.close()

    run_threads(3, rank_main)
    if driver is not None:
        driver.close()


def test_the_first_that_left_is_blamed_also_when_others_have_left_since() -> None:
    left = threading.Barrier(3)

    def rank_main(rank: int) -> None:
        exchange = at_server(address, rank, 3, SECRET, soon())
        exchange.allgather(b"")
        for leaving in (2, 0):
            if rank == leaving:
                exchange.close()
            while driver.server._rounds.guests.get(leaving) is not None:
                time.sleep(0.001)
            left.wait(LIMIT)
        if rank == 1:
            with pytest.raises(HorovodInternalError, match="rank 2 has left"):
                exchange.allgather(b"")
        exchange.close()

    with serving(3) as (address, driver):
        run_threads(3, rank_main)


def test_a_rank_that_begins_again_in_the_middle_does_not_mix_two_meetings() -> None:
    second = threading.Event()

    def rank_main(rank: int) -> Any:
        exchange = at_server(address, rank, 2, SECRET, soon())
        exchange.allgather(b"")
        if rank == 0:
            exchange.close()
            exchange = at_server(address, rank, 2, SECRET, soon())
            second.set()
            return meet(exchange)
        assert second.wait(LIMIT)
        with pytest.raises(HorovodInternalError, match="rank 0 has left"):
            exchange.allgather(b"")
        exchange.close()
        return meet(at_server(address, rank, 2, SECRET, soon()))

    with serving(2) as (address, _):
        assert run_threads(2, rank_main) == [expected(2)] * 2


def test_the_server_makes_all_that_wait_fail() -> None:
    def rank_main(rank: int) -> None:
        exchange = at_server(address, rank, 3, SECRET, soon())
        with pytest.raises(HorovodInternalError, match="node2 is lost"):
            exchange.allgather(b"")
        exchange.close()

    with serving(3) as (address, driver):

        def fail() -> None:
            while driver.server._rounds.waiting(Key((), 0)) != [0, 1]:
                time.sleep(0.001)
            with driver.lock:
                assert driver.server.missing() == [2]
                driver.server.fail("node2 is lost")

        teller = threading.Thread(target=fail)
        teller.start()
        run_threads(2, rank_main)
        teller.join()


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("first", ["rank 0 waits", "rank 2 finishes"])
def test_who_needs_a_rank_that_has_finished_is_told_at_once(first: str, here: bool) -> None:
    """Rank 2 is one of this server, or one of another host; a meeting without it goes well."""
    options: dict[str, Any] = {} if here else {"ranks": (0, 1, 3), "gathered": lambda *_: None}

    def refused(rank: int, members: list[int] | None) -> None:
        exchange = at_server(address, rank, 4, SECRET, soon(), members)
        with pytest.raises(HorovodInternalError) as raised:
            exchange.allgather(b"")
        assert "rank 2 ended with exit code 0 without calling init()" in str(raised.value)
        assert raised.value.rank == 2
        exchange.close()

    def rank_main(rank: int) -> None:
        if rank == 2:
            wanted = [0] if first == "rank 0 waits" else []
            while driver.server._rounds.waiting(Key((), 0)) != wanted:
                time.sleep(0.001)
            with driver.lock:
                driver.server.finish([2])
            told.set()
            return
        if rank != 0 or first != "rank 0 waits":
            assert told.wait(LIMIT)
        if rank:
            exchange = at_server(address, rank, 4, SECRET, soon(), [1, 3])
            if here:
                meet(exchange)
            else:
                exchange.close()
        refused(rank, None if rank == 0 else [rank, 2])

    told = threading.Event()
    with serving(4, **options) as (address, driver):
        run_threads(4, rank_main)


def test_who_has_finished_after_a_meeting_came_before_the_next_one() -> None:
    def rank_main(rank: int) -> None:
        meet(at_server(address, rank, 2, SECRET, soon()))
        if rank:
            with driver.lock:
                driver.server.finish([1])
            return
        exchange = at_server(address, rank, 2, SECRET, soon())
        with pytest.raises(HorovodInternalError, match=r"rank 1 ended .* before this init"):
            exchange.allgather(b"")
        exchange.close()

    with serving(2) as (address, driver):
        run_threads(2, rank_main)


def test_a_connection_that_is_lost_before_the_first_round_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send, lost = ServerExchange._send, [ConnectionResetError("reset by peer")]

    def send_later(exchange: ServerExchange, *message: Any) -> None:
        if message[0] == wire.JOIN and lost:
            raise lost.pop()
        send(exchange, *message)

    monkeypatch.setattr(ServerExchange, "_send", send_later)
    with serving(2) as (address, _), all_sockets_closed():
        results = run_threads(2, lambda rank: meet(at_server(address, rank, 2, SECRET, soon())))
    assert results == [expected(2)] * 2 and not lost


def test_a_server_that_ends_between_two_rounds_is_named() -> None:
    with serving(1) as (address, driver):
        exchange = at_server(address, 0, 1, SECRET, soon())
        exchange.allgather(b"")
        driver.close()
        with pytest.raises(HorovodInternalError, match="ended while the ranks of this job connect"):
            exchange.allgather(b"")
        exchange.close()


# -- ranks that are wrong: refused, and the others meet


def test_a_wrong_rank_is_told_and_does_not_disturb_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(2) as (address, driver):
        first = at_server(address, 0, 2, SECRET, soon())
        wrong: list[tuple[int, int, bytes, str]] = [
            (1, 3, SECRET, "rank 1 counts 3 ranks in the job, and .* counts 2"),
            (2, 2, SECRET, "rank 2 does not meet here: the ranks here are 0, 1"),
            (1, 2, b"guess", "has another secret: HVDLITE_SECRET must be the same"),
        ]
        for rank, size, secret, text in wrong:
            with pytest.raises(HorovodInternalError, match=f"refuses this rank: .*{text}"):
                at_server(address, rank, size, secret, soon())
        with monkeypatch.context() as patched:
            patched.setattr("hvdlite.common.meeting.client.DUPLICATE_SECONDS", 0.1)
            with pytest.raises(HorovodInternalError, match="rank 0 is here already: two processes"):
                at_server(address, 0, 2, SECRET, soon())
        with monkeypatch.context() as patched:
            packed = wire.pack_claim
            patched.setattr(
                wire,
                "pack_claim",
                lambda *args: (raw := packed(*args))[:8] + struct.pack("<I", 999) + raw[12:],
            )
            with pytest.raises(HorovodVersionMismatchError, match=r"\(protocol 999\) is installed"):
                at_server(address, 1, 2, SECRET, soon())
        notes = " | ".join(driver.server.notes())
        assert "rank 1 counts 3" in notes and "protocol 999" in notes, notes
        second = at_server(address, 1, 2, SECRET, soon())
        assert run_threads(2, lambda rank: meet((first, second)[rank])) == [expected(2)] * 2


def test_those_who_wait_hear_why_a_rank_was_refused() -> None:
    with serving(2) as (address, _):
        with pytest.raises(HorovodInternalError, match="refuses"):
            at_server(address, 1, 3, SECRET, soon())
        with pytest.raises(HorovodInternalError, match=r"come: 1 .*rank 1 counts 3 ranks"):
            meet(at_server(address, 0, 2, SECRET, soon(0.2)))


def test_a_rank_that_comes_again_before_its_end_is_seen_is_let_in() -> None:
    with serving(2) as (address, _):
        first = at_server(address, 0, 2, SECRET, soon())
        first.allgather  # noqa: B018 - it has joined and waits for nobody
        closer = threading.Timer(0.2, first.close)
        closer.start()
        again = at_server(address, 0, 2, SECRET, soon())
        closer.join()
        other = at_server(address, 1, 2, SECRET, soon())
        assert run_threads(2, lambda rank: meet((again, other)[rank])) == [expected(2)] * 2


def test_ranks_of_another_start_of_the_job_wait_for_their_own_server() -> None:
    old, new = wire.job_digest("7 start 0"), wire.job_digest("7 start 1")
    listener = listen(Address("127.0.0.1", 0))
    address = port_of(listener)
    closed = threading.Event()

    def rank_main(rank: int) -> Any:
        if rank == 1:
            return meet(at_server(address, 1, 2, SECRET, soon(), job=new))
        assert closed.wait(LIMIT)
        return meet(hosting(listen(address), 0, 2, SECRET, soon(), job=new))

    driver = Driver(lambda: MeetingServer(listener, range(2), 2, SECRET, job=old))
    closer = threading.Timer(0.3, lambda: (driver.close(), closed.set()))
    closer.start()
    assert run_threads(2, rank_main) == [expected(2)] * 2
    closer.join()


def test_of_several_ports_the_one_of_the_job_is_found() -> None:
    """Two jobs of Slurm whose ports are neighbours, and a program that is no server."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        serving(1, b"another job") as (theirs, _),
        serving(2, b"this job") as (ours, _),
    ):
        silent.listen()
        chatty = threading.Thread(target=answer_http, args=(silent,), daemon=True)
        chatty.start()
        addresses = [Address("127.0.0.1", silent.getsockname()[1]), theirs, ours]
        results = run_threads(
            2, lambda rank: meet(at_server(addresses, rank, 2, b"this job", soon()))
        )
    assert results == [expected(2)] * 2


def answer_http(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" + b" " * 99)
            connection.close()


# -- strangers


def stranger(address: Address, data: bytes) -> bytes:
    """What the server says to `data` until it closes; fails when it does not."""
    with socket.create_connection(address[:2], timeout=LIMIT) as connection:
        connection.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                answer += part
        return answer


def proven(rank: int, size: int, frames: bytes, address: Address) -> bytes:
    """What the server says to `frames` of a rank that has the secret."""
    with socket.create_connection(address[:2], timeout=LIMIT) as connection:
        greeting = wire.unpack_greeting(connection.recv(wire.GREETING.size, socket.MSG_WAITALL))
        nonce = handshake.new_nonce()
        claim = wire.pack_claim(bytes(wire.JOB_BYTES), rank, size, nonce)
        mine = handshake.proof(SECRET, handshake.CONNECTS, greeting.nonce + nonce, claim)
        connection.sendall(claim + mine + frames)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                answer += part
        return answer


def test_strangers_are_dropped_and_the_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (server_module, doorway_module):
        monkeypatch.setattr(module, "SILENCE_SECONDS", 0.3)
    with serving(2) as (address, _):
        first = at_server(address, 0, 2, SECRET, soon())
        garbage = [
            b"GET / HTTP/1.1\r\n\r\n",
            b"\0" * 4096,
            wire.MAGIC + b"\xff" * 4096,  # a claim without a proof
            b"",  # silence
            wire.MAGIC[:5],  # silence in the middle
        ]
        for data in garbage:
            answer = stranger(address, data)
            assert answer[: wire.GREETING.size].startswith(wire.MAGIC)
            assert handshake.proof(SECRET, b"listens", b"", b"") not in answer
        second = at_server(address, 1, 2, SECRET, soon())
        assert run_threads(2, lambda rank: meet((first, second)[rank])) == [expected(2)] * 2


@pytest.mark.parametrize(
    "frames",
    [
        struct.pack("<I", wire.FRAME_BYTES + 1),  # too long: nobody waits for its bytes
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        wire.pack_frame("join", [0, 9]),
        wire.pack_frame("join", [0, 0]),
        wire.pack_frame("gather", 0, b""),  # before it has joined
        wire.pack_frame("join", []) + wire.pack_frame("gather", 1, b""),
        wire.pack_frame("join", []) + wire.pack_frame("gather", 0, b"") * 2,
        wire.pack_frame("join", [])
        + wire.pack_frame("gather", 0, b"")
        + wire.pack_frame("gather", 1, b""),
        wire.pack_frame("join", []) * 2,
        wire.pack_frame("exec", "rm"),
        wire.pack_frame(),
    ],
)
def test_a_rank_that_breaks_the_protocol_is_dropped_and_can_come_right(frames: bytes) -> None:
    with serving(2) as (address, driver):
        proven(0, 2, frames, address)  # returns: the server closes
        assert any("was closed" in note for note in driver.server.notes())
        results = run_threads(2, lambda rank: meet(at_server(address, rank, 2, SECRET, soon())))
    assert results == [expected(2)] * 2


def test_a_proof_that_was_overheard_does_not_serve_again() -> None:
    """An attacker who hears a claim says it again: the nonce of the server has changed."""
    with serving(2) as (address, driver):
        with socket.create_connection(address[:2], timeout=LIMIT) as connection:
            greeting = wire.unpack_greeting(connection.recv(wire.GREETING.size, socket.MSG_WAITALL))
            claim = wire.pack_claim(bytes(wire.JOB_BYTES), 0, 2, bytes(handshake.NONCE_BYTES))
            overheard = claim + handshake.proof(
                SECRET, handshake.CONNECTS, greeting.nonce + bytes(handshake.NONCE_BYTES), claim
            )
        answer = stranger(address, overheard)
        assert answer[wire.GREETING.size] == wire.OTHER_SECRET
        assert driver.server.missing() == [0, 1]


def test_a_false_server_is_not_believed() -> None:
    """It accepts everybody, but cannot prove that it knows the secret."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept_all() -> None:
            connection, _ = listener.accept()
            connection.sendall(wire.pack_greeting(handshake.new_nonce()))
            connection.recv(wire.CLAIM_BYTES, socket.MSG_WAITALL)
            connection.sendall(wire.pack_acceptance(b"a guess", b"", b""))
            connection.recv(1)
            connection.close()

        thread = threading.Thread(target=accept_all)
        thread.start()
        with pytest.raises(HorovodInternalError, match="does not know the secret of this job"):
            at_server(Address("127.0.0.1", listener.getsockname()[1]), 0, 1, SECRET, soon())
        thread.join()


def test_a_flood_of_connections_leaves_the_ranks_alone() -> None:
    with serving(2) as (address, driver), contextlib.ExitStack() as flood:
        first = at_server(address, 0, 2, SECRET, soon())
        for _ in range(300):
            flood.enter_context(socket.create_connection(address[:2], timeout=LIMIT))
        second = at_server(address, 1, 2, SECRET, soon())
        assert len(driver.server._connections) <= 2 + driver.server._most_strangers
        assert run_threads(2, lambda rank: meet((first, second)[rank])) == [expected(2)] * 2


def wakes(server: MeetingServer, seconds: float) -> int:
    """Drive a server for some time; how often it had something to do."""
    poller = select.poll()
    poller.register(server, select.POLLIN)
    count, end = 0, time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if poller.poll(left * 1000):
            server.handle()
            count += 1
    return count


def greeted(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def test_a_server_without_free_descriptors_sleeps_until_a_connection_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = listen(Address("127.0.0.1", 0))
    address = port_of(listener)
    server = MeetingServer(listener, range(2), 2, SECRET)
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        first, second, third = (
            stack.enter_context(socket.create_connection(address[:2], timeout=LIMIT))
            for _ in range(3)
        )
        with caplog.at_level(logging.WARNING, "hvdlite"), no_free_descriptor():
            assert wakes(server, 0.3) < 5
            assert not any(greeted(connection) for connection in (first, second, third))
            assert wakes(server, 0.3) == 0
        assert "Too many open files" in caplog.text and len(caplog.records) == 1, caplog.text
        stack.enter_context(socket.create_connection(address[:2], timeout=LIMIT))
        wakes(server, 0.1)
        assert all(greeted(connection) for connection in (first, second, third))


def test_a_descriptor_that_gets_free_is_for_the_connection_that_waits() -> None:
    listener = listen(Address("127.0.0.1", 0))
    address = port_of(listener)
    server = MeetingServer(listener, range(2), 2, SECRET)
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        first, second = (socket.create_connection(address[:2], timeout=LIMIT) for _ in range(2))
        stack.callback(second.close)
        first.close()
        server.handle()  # It has both.
        third = stack.enter_context(socket.create_connection(address[:2], timeout=LIMIT))
        with no_free_descriptor():
            wakes(server, 0.1)  # The first has ended, which is seen before the third is accepted.
            assert greeted(third) and greeted(second)


def test_the_server_leaves_no_descriptor_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with serving(3) as (address, _):
        run_threads(3, lambda rank: meet(at_server(address, rank, 3, SECRET, soon())))
        stranger_socket = socket.create_connection(address[:2])
    stranger_socket.close()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_process_with_many_open_files_meets() -> None:
    """select() ends at descriptor 1023, and a process that reads many files has more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 2048:
        pytest.skip(f"this user may open {before[1]} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, before[0]), before[1]))
    null = os.open(os.devnull, os.O_RDONLY)
    opened = [null, *(os.dup(null) for _ in range(1100))]
    try:
        hosted = listen(Address("127.0.0.1", 0))
        address = port_of(hosted)

        def rank_main(rank: int) -> Any:
            if rank == 0:
                return meet(hosting(hosted, 0, 2, SECRET, soon()))
            return meet(at_server(address, rank, 2, SECRET, soon()))

        assert run_threads(2, rank_main) == [expected(2)] * 2
        served = listen(Address("127.0.0.1", 0))
        address = port_of(served)
        with contextlib.closing(ServedMeeting(served, 2, SECRET.decode())):
            results = run_threads(2, lambda rank: meet(at_server(address, rank, 2, SECRET, soon())))
        assert results == [expected(2)] * 2
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_secret_is_on_no_wire() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        heard: list[bytes] = []

        def listen_in() -> None:
            connection, _ = listener.accept()
            connection.sendall(wire.pack_greeting(handshake.new_nonce()))
            heard.append(connection.recv(wire.CLAIM_BYTES, socket.MSG_WAITALL))
            connection.close()

        thread = threading.Thread(target=listen_in)
        thread.start()
        with pytest.raises(HorovodInternalError):
            at_server(Address("127.0.0.1", listener.getsockname()[1]), 0, 1, SECRET, soon(0.5))
        thread.join()
    assert len(heard[0]) == wire.CLAIM_BYTES and SECRET not in heard[0]
    assert not re.search(re.escape(SECRET.hex().encode()), heard[0])
