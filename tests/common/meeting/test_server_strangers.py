"""The server of a meeting: ranks that are wrong, and strangers."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import threading
import time
from typing import Any

import pytest

from hvdlite.common.base.errors import HorovodInternalError, HorovodVersionMismatchError
from hvdlite.common.connections import prove
from hvdlite.common.connections.address import Address, listen
from hvdlite.common.connections.frames import frame, pack
from hvdlite.common.connections.prove import Challenge, Party, Software
from hvdlite.common.meeting import server as server_module
from hvdlite.common.meeting import wire
from hvdlite.common.meeting.meet import ServedMeeting
from hvdlite.common.meeting.server import MeetingServer
from tests.common.meeting.serving import (
    LIMIT,
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

NEW_CLAIM = prove.Claim.new


def of_another_protocol(party: Party, body: bytes) -> prove.Claim:
    return NEW_CLAIM(party, body)._replace(software=Software(999, "9.9"))


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
            patched.setattr(prove.Claim, "new", of_another_protocol)
            with pytest.raises(HorovodVersionMismatchError, match=r"\(protocol 999\) is installed"):
                at_server(address, 1, 2, SECRET, soon())
        # The rank that is refused may know it before the server has written it down.
        end, notes = time.monotonic() + LIMIT, ""
        while "protocol 999" not in notes:
            assert time.monotonic() < end, notes
            notes = " | ".join(driver.server.notes())
        assert "rank 1 counts 3" in notes, notes
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

    driver = Driver(lambda loop: MeetingServer(loop, listener, range(2), 2, SECRET, job=old))
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


def stranger(address: Address, data: bytes) -> bytes:
    """What the server says to `data` until it closes; fails when it does not."""
    with socket.create_connection(address[:2], timeout=LIMIT) as connection:
        connection.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                answer += part
        return answer


def claim_of(rank: int, size: int) -> prove.Claim:
    body = wire.Claim(rank, size, bytes(wire.JOB_BYTES)).pack()
    return prove.Claim.new(Party(SECRET, wire.RANK, wire.SERVER), body)


def challenge_of(connection: socket.socket) -> Challenge:
    return Challenge.unpack(connection.recv(prove.CHALLENGE.size, socket.MSG_WAITALL))


def proven(rank: int, size: int, frames: bytes, address: Address) -> bytes:
    """What the server says to `frames` of a rank that has the secret."""
    with socket.create_connection(address[:2], timeout=LIMIT) as connection:
        challenge, claim = challenge_of(connection), claim_of(rank, size)
        connection.sendall(prove.prove_claim(SECRET, challenge, claim) + prove.GO + frames)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                answer += part
        return answer


def test_strangers_are_dropped_and_the_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SILENCE_SECONDS", 0.3)
    with serving(2) as (address, _):
        first = at_server(address, 0, 2, SECRET, soon())
        garbage = [
            b"GET / HTTP/1.1\r\n\r\n",
            b"\0" * 4096,
            prove.MAGIC + b"\xff" * 4096,  # a claim without a proof
            b"",  # silence
            prove.MAGIC[:5],  # silence in the middle
        ]
        for data in garbage:
            answer = stranger(address, data)
            assert answer[: prove.CHALLENGE.size].startswith(prove.MAGIC)
            assert SECRET not in answer
        second = at_server(address, 1, 2, SECRET, soon())
        assert run_threads(2, lambda rank: meet((first, second)[rank])) == [expected(2)] * 2


def said(*message: Any) -> bytes:
    return frame(pack(message))


@pytest.mark.parametrize(
    "frames",
    [
        struct.pack("<II", wire.FRAME_BYTES + 1, 0),  # too long: nobody waits for its bytes
        frame(b"\xc1\xc1\xc1"),
        said("join", [0, 9]),
        said("join", [0, 0]),
        said("gather", 0, b""),  # before it has joined
        said("join", []) + said("gather", 1, b""),
        said("join", []) + said("gather", 0, b"") * 2,
        said("join", []) + said("gather", 0, b"") + said("gather", 1, b""),
        said("join", []) * 2,
        said("exec", "rm"),
        said(),
    ],
)
def test_a_rank_that_breaks_the_protocol_is_dropped_and_can_come_right(frames: bytes) -> None:
    with serving(2) as (address, driver):
        proven(0, 2, frames, address)  # returns: the server closes
        with driver.lock:  # The note follows in the same turn.
            assert any("was closed" in note for note in driver.server.notes())
        results = run_threads(2, lambda rank: meet(at_server(address, rank, 2, SECRET, soon())))
    assert results == [expected(2)] * 2


def test_a_false_server_is_not_believed() -> None:
    """It accepts everybody, but cannot prove that it knows the secret."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept_all() -> None:
            connection, _ = listener.accept()
            challenge = Challenge.new()
            connection.sendall(challenge.pack())
            raw = connection.recv(prove.PROVEN_CLAIM_BYTES, socket.MSG_WAITALL)
            claim = prove.Claim.unpack(raw[: prove.CLAIM.size])
            connection.sendall(prove.acceptance(b"a guess", challenge, claim))
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
        assert len(driver.server._listener._strangers) <= driver.server._listener._most_strangers
        assert run_threads(2, lambda rank: meet((first, second)[rank])) == [expected(2)] * 2


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


def test_a_rank_with_another_protocol_of_another_job_is_refused_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Jobs without a secret may come to each other's addresses."""
    with serving(2) as (address, driver):
        first = at_server(address, 0, 2, SECRET, soon())
        with monkeypatch.context() as patched:
            patched.setattr(prove.Claim, "new", of_another_protocol)
            for rank, size in [(1, 3), (5, 2)]:
                with pytest.raises(HorovodVersionMismatchError):
                    at_server(address, rank, size, SECRET, soon())
        second = at_server(address, 1, 2, SECRET, soon())
        assert run_threads(2, lambda rank: meet((first, second)[rank])) == [expected(2)] * 2
        assert not [note for note in driver.server.notes() if "999" in note]


@pytest.mark.parametrize("hosted", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_with_another_protocol_ends_the_wait_of_all_others_at_once(
    monkeypatch: pytest.MonkeyPatch, *, hosted: bool, waits: bool
) -> None:
    """They know it as soon as that rank does, and wait for nothing."""
    other = threading.local()

    def new_claim(party: Party, body: bytes) -> prove.Claim:
        return (of_another_protocol if hasattr(other, "version") else NEW_CLAIM)(party, body)

    monkeypatch.setattr(prove.Claim, "new", new_claim)
    refused = threading.Event()

    def rank_main(rank: int, address: Address, listener: socket.socket | None) -> None:
        if rank == 1:
            other.version = True
            try:
                at_server(address, 1, 2, SECRET, soon())
            finally:
                refused.set()
        if listener is None:
            exchange: Any = at_server(address, 0, 2, SECRET, soon())
            if not waits:
                assert refused.wait(LIMIT)
        else:
            exchange = hosting(listener, 0, 2, SECRET, soon())
        try:
            exchange.allgather(b"")
        finally:
            exchange.close()

    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        if hosted:
            listener: socket.socket | None = listen(Address("127.0.0.1", 0))
            assert listener is not None
            address = port_of(listener)
        else:
            listener, (address, _) = None, stack.enter_context(serving(2))
        errors = run_threads(2, lambda rank: error_of(rank_main, rank, address, listener))
    for error in errors:
        assert isinstance(error, HorovodVersionMismatchError), error
    assert "another rank runs" in str(errors[0]) and "(protocol 999)" in str(errors[0])
    assert time.monotonic() - began < LIMIT / 2


def error_of(function: Any, *args: Any) -> Exception | None:
    try:
        function(*args)
    except Exception as error:
        return error
    return None
