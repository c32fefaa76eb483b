"""The server of a meeting: ranks that are late or lost."""

from __future__ import annotations

import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.connections.address import Address, listen
from hvdlite.common.meeting import client as client_module
from hvdlite.common.meeting import wire
from hvdlite.common.meeting.client import ServerExchange
from hvdlite.common.meeting.detection import detect
from hvdlite.common.meeting.meet import meet as meet_at
from hvdlite.common.meeting.rounds import Key
from hvdlite.common.meeting.server import MeetingServer
from hvdlite.common.meeting.start_wait import Presence
from tests.common.meeting.serving import (
    LIMIT,
    SECRET,
    Driver,
    all_sockets_closed,
    at_server,
    expected,
    hosting,
    meet,
    port_of,
    serving,
    soon,
)
from tests.ranks import run_threads


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


@pytest.mark.parametrize(
    ("missing", "left", "elsewhere", "said"),
    [
        ([2], [], [], "these ranks did not come: 2 (seen: 0, 1)"),
        ([], [2], [], "these ranks came and left again: 2 (seen: 0, 1, 2)"),
        ([], [], None, "ranks of other hosts did not come (seen on this host: 0, 1)"),
        ([], [], [3], "ranks of other hosts did not come (seen: 0, 1, 3)"),
    ],
)
def test_who_has_not_come_is_said(
    missing: list[int], left: list[int], elsewhere: list[int] | None, said: str
) -> None:
    assert Presence(missing, [0, 1], left, [], elsewhere).spell() == said
    assert Presence(missing, [0, 1], left, ["4 is ill"], elsewhere).spell() == f"{said}; 4 is ill"


def test_who_outlives_its_job_hears_so_at_once(tmp_path: Path) -> None:
    """As a process that a rank has left behind: the folder of the meeting goes with the job."""
    with pytest.raises(HorovodInternalError, match="any more: hvdlite-run, which has started"):
        at_server(f"unix:{tmp_path}/gone/meeting", 1, 2, SECRET, soon())


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
        pytest.raises(
            HorovodInternalError,
            match=r"who it is: it is another program, or stopped\): another program may own",
        ),
    ):
        at_server(Address("127.0.0.1", silent.getsockname()[1]), 1, 2, SECRET, soon(0.4))


@pytest.mark.parametrize("hosted", [False, True])
def test_a_rank_that_never_comes_is_named_by_all_others(
    hosted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    listener = listen(Address("127.0.0.1", 0))
    address = port_of(listener)
    driver = (
        None if hosted else Driver(lambda loop: MeetingServer(loop, listener, range(4), 4, SECRET))
    )

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
        exchange = hosting(first, 0, 3, SECRET, soon(2.0))
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
            else hosting(listener, 0, 3, SECRET, soon(2.0))
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
            # On a busy machine the other of both may come too late for it, too.
            with pytest.raises(HorovodInternalError, match=r"did not come: ([01], )?2 "):
                meet(at_server(address, rank, 3, SECRET, soon(0.3)))
        gave_up.wait(LIMIT)
        return meet(at_server(address, rank, 3, SECRET, soon()))

    with serving(3) as (address, _):
        assert run_threads(3, rank_main) == [expected(3)] * 3


@pytest.mark.parametrize("hosted", [False, True])
def test_a_rank_that_is_lost_in_the_middle_ends_the_wait_of_the_others(hosted: bool) -> None:
    listener = listen(Address("127.0.0.1", 0))
    address = port_of(listener)
    driver = (
        None if hosted else Driver(lambda loop: MeetingServer(loop, listener, range(3), 3, SECRET))
    )

    def rank_main(rank: int) -> None:
        exchange: Any
        if rank == 0 and hosted:
            exchange = hosting(listener, 0, 3, SECRET, soon())
        else:
            exchange = at_server(address, rank, 3, SECRET, soon())
        exchange.allgather(b"")
        if rank == 2:
            (exchange._link or pytest.fail("it is not connected")).close()  # As its end does.
            exchange._link = None
            exchange.close()
            return
        began = time.monotonic()
        with pytest.raises(HorovodInternalError, match="rank 2 has left") as raised:
            exchange.allgather(b"")
        assert raised.value.rank == 2 and time.monotonic() - began < LIMIT / 2
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
            while driver.server.rounds.guests.get(leaving) is not None:
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
            while driver.server.rounds.waiting(Key((), 0)) != [0, 1]:
                time.sleep(0.001)
            with driver.lock:
                assert driver.server.rounds.missing() == [2]
                driver.server.rounds.fail("node2 is lost")

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
            while driver.server.rounds.waiting(Key((), 0)) != wanted:
                time.sleep(0.001)
            with driver.lock:
                driver.server.rounds.finish([2])
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
                driver.server.rounds.finish([1])
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
    send, lost = ServerExchange._send, [socket.SHUT_RDWR]

    def send_later(exchange: ServerExchange, *message: Any) -> None:
        if message[0] == wire.JOIN and lost:
            assert exchange._link is not None
            exchange._link._connection.shutdown(lost.pop())
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
