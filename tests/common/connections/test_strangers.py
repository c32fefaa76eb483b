"""What a listener does with those who are not of the job: they cost little, and end nothing."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from hvdlite.common.base.errors import HorovodVersionMismatchError, ProtocolError
from hvdlite.common.connections import prove
from hvdlite.common.connections.dial import Refused
from hvdlite.common.connections.listener import Refusal
from hvdlite.common.connections.loop import Loop
from hvdlite.common.connections.prove import Challenge, Claim, Party, Software
from tests.common.connections.ends import (
    LIMITS,
    SECRET,
    WORKER,
    Caller,
    Host,
    VirtualLoop,
    is_closed,
    run_until,
    strangers,
    target,
    tcp,
)
from tests.descriptors import no_free_descriptor

pytestmark = pytest.mark.timeout(120)


def listening_socket(kind: str, folder: Path) -> socket.socket:
    if kind == "unix":
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(folder / "s"))
    elif kind == "abstract":
        listening = socket.socket(socket.AF_UNIX)
        listening.bind("")
    else:
        return tcp(socket.AF_INET6 if kind == "ipv6" else socket.AF_INET)
    listening.listen()
    return listening


def read(loop: Loop, connection: socket.socket, count: int) -> bytes:
    """Read `count` bytes of what the loop sends."""
    data = b""
    connection.setblocking(False)
    while len(data) < count:
        loop.run_once(0.01)
        try:
            part = connection.recv(count - len(data))
        except BlockingIOError:
            continue
        assert part, "the connection was closed"
        data += part
    return data


def challenge(loop: Loop, connection: socket.socket) -> Challenge:
    return Challenge.unpack(read(loop, connection, prove.CHALLENGE.size))


@pytest.mark.parametrize("kind", ["tcp", "ipv6", "unix", "abstract"])
def test_both_ends_prove_themselves_on_every_kind_of_socket(kind: str, tmp_path: Path) -> None:
    loop = Loop()
    host = Host(loop, listening_socket(kind, tmp_path), same_user=True)
    caller = Caller(loop, host.target, body=b"rank 3")
    run_until(loop, lambda: host.accepted and caller.over)
    assert caller.connection is not None
    claim, connection = host.accepted[0]
    assert (claim.role, claim.body) == ("worker", b"rank 3")
    connection.sendall(b"hello")
    assert read(loop, caller.connection, 5) == b"hello"
    caller.connection.close()
    host.close()


def test_a_path_may_be_longer_than_a_socket_allows(tmp_path: Path) -> None:
    from hvdlite.common.connections.address import Address, listen, targets

    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    address = Address(path=str(folder / "socket"))
    loop = Loop()
    host = Host(loop, listen(address))
    caller = Caller(loop, *targets(address))
    run_until(loop, lambda: caller.over)
    assert caller.connection is not None
    caller.connection.close()
    host.close()


def test_another_user_is_refused_on_a_unix_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    host = Host(loop, listening_socket("abstract", Path()), same_user=True)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    caller = Caller(loop, host.target)
    run_until(loop, lambda: caller.over)
    assert caller.connection is None and not host.accepted
    host.close()


@pytest.mark.parametrize(
    ("party", "code"),
    [
        (Party(b"another", "worker", "server"), prove.OTHER_SECRET),
        (Party(SECRET, "agent", "server"), prove.OTHER_ROLE),
        (Party(SECRET, "worker", "launcher"), prove.OTHER_ROLE),
        (Party(SECRET, "server", "worker"), prove.OTHER_ROLE),
    ],
)
def test_who_has_another_secret_or_role_is_refused_with_the_reason(party: Party, code: int) -> None:
    loop = Loop()
    host = Host(loop)
    caller = Caller(loop, host.target, party=party)
    run_until(loop, lambda: caller.over)
    assert caller.failures is not None and not host.accepted
    error = caller.failures[0].error
    assert isinstance(error, Refused) and error.code == code
    assert [each for each, _ in host.refused] == [code]
    host.close()


def test_one_that_is_refused_may_be_gone_before_it_reads_why() -> None:
    loop = Loop()
    host = Host(loop)
    with strangers(host.target, 1) as [stranger]:
        # A connection that is closed with something unread is reset.
        host.listener.refused = lambda code, sentence, claim: stranger.close()
        said = prove.prove_claim(b"another", challenge(loop, stranger), Claim.new(WORKER, b""))
        stranger.sendall(said)
        run_until(loop, lambda: stranger.fileno() < 0)
    run_until(loop, lambda: not host.listener._strangers)
    host.close()


def test_one_that_was_judged_well_and_leaves_is_reported() -> None:
    loop = Loop()
    left: list[bytes] = []
    host = Host(loop, left=lambda claim: left.append(claim.body), most_strangers=2)
    with strangers(host.target, 2) as (leaves, pushed_out):
        for body, stranger in ((b"1", leaves), (b"2", pushed_out)):
            claim = Claim.new(WORKER, body)
            stranger.sendall(prove.prove_claim(SECRET, challenge(loop, stranger), claim))
        run_until(loop, lambda: len(host.listener.claims()) == 2)
        assert left == []
        leaves.close()
        run_until(loop, lambda: left == [b"1"])
        with strangers(host.target, 2):
            run_until(loop, lambda: left == [b"1", b"2"])
    assert not host.accepted
    host.close()


def test_the_judgement_of_the_listener_reaches_the_other_end() -> None:
    loop = Loop()
    host = Host(loop, judge=lambda claim: Refusal(prove.FIRST_OWN, f"{claim.body!r} is late"))
    caller = Caller(loop, host.target, body=b"7")
    run_until(loop, lambda: caller.over)
    assert caller.failures is not None
    error = caller.failures[0].error
    assert isinstance(error, Refused)
    assert (error.code, str(error)) == (prove.FIRST_OWN, "b'7' is late")
    host.close()


def test_another_protocol_is_named_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    host = Host(loop)
    ours = prove.OURS
    with monkeypatch.context() as patch:
        patch.setattr(prove, "OURS", Software(999, "9.9"))
        claim = Claim.new(WORKER, b"")
    monkeypatch.setattr(Claim, "new", lambda party, body: claim)
    caller = Caller(loop, host.target)
    run_until(loop, lambda: caller.over)
    assert caller.failures is not None
    error = caller.failures[0].error
    assert isinstance(error, HorovodVersionMismatchError)
    assert "9.9 (protocol 999)" in str(error) and str(ours) in str(error)
    assert host.refused[0][0] == prove.OTHER_PROTOCOL and "9.9" in host.refused[0][1]
    host.close()


def test_a_proof_serves_on_no_other_connection() -> None:
    loop = Loop()
    host = Host(loop)
    with strangers(host.target, 2) as (first, second):
        said = prove.prove_claim(SECRET, challenge(loop, first), Claim.new(WORKER, b""))
        challenge(loop, second)
        second.sendall(said)
        assert read(loop, second, 1)[0] == prove.OTHER_SECRET
        assert is_closed(loop, second)
    assert not host.accepted
    host.close()


def test_the_proof_of_one_end_does_not_serve_as_that_of_the_other() -> None:
    """Somebody between listens with the words of the caller, and has no secret."""
    loop = Loop()
    with tcp() as false_server:
        caller = Caller(loop, target(false_server))
        run_until(loop, lambda: is_waiting(false_server))
        connection, _ = false_server.accept()
        connection.sendall(Challenge.new().pack())
        said = read(loop, connection, prove.PROVEN_CLAIM_BYTES)
        connection.sendall(prove.REPLY.pack(prove.ACCEPTED, prove.PROOF_BYTES))
        connection.sendall(said[-prove.PROOF_BYTES :])
        run_until(loop, lambda: caller.over)
        connection.close()
    assert caller.failures is not None
    error = caller.failures[0].error
    assert isinstance(error, Refused) and error.code == prove.OTHER_SECRET


def is_waiting(listening: socket.socket) -> bool:
    import select

    poll = select.poll()
    poll.register(listening, select.POLLIN)
    return bool(poll.poll(0))


def test_no_bit_of_a_claim_can_be_changed() -> None:
    claim = prove.prove_claim(SECRET, given := Challenge.new(), Claim.new(WORKER, b"body"))
    assert prove.check_claim(SECRET, given, claim) is not None
    assert SECRET not in claim and SECRET.hex().encode() not in claim
    for at in range(len(claim)):
        changed = bytearray(claim)
        changed[at] ^= 1
        assert prove.check_claim(SECRET, given, bytes(changed)) is None
    assert prove.check_claim(SECRET, Challenge.new(), claim) is None


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, b"SSH-2.0-x\r\n"])
def test_another_program_is_closed_at_its_first_bytes(garbage: bytes) -> None:
    loop = Loop()
    host = Host(loop)
    with strangers(host.target, 1) as [stranger]:
        challenge(loop, stranger)
        stranger.sendall(garbage)
        assert is_closed(loop, stranger)
    assert repr(garbage[:8]) in host.refused[0][1]
    host.close()


def test_a_claim_may_come_byte_by_byte_and_nothing_after_it_is_read_before_it_is_accepted() -> None:
    loop = Loop()
    host = Host(loop)
    with strangers(host.target, 1) as [stranger]:
        said = prove.prove_claim(SECRET, challenge(loop, stranger), Claim.new(WORKER, b""))
        for at in range(len(said)):
            stranger.sendall(said[at : at + 1])
            loop.run_once(1)
        read(loop, stranger, prove.REPLY.size + prove.PROOF_BYTES)
        assert not host.accepted
        stranger.sendall(prove.GO + b"the first message")
        run_until(loop, lambda: host.accepted)
        assert read(loop, host.accepted[0][1], 17) == b"the first message"
    host.close()


def test_the_oldest_stranger_makes_room_and_an_honest_end_comes_through() -> None:
    loop = Loop()
    host = Host(loop, most_strangers=4)
    with strangers(host.target, 20) as crowd:
        run_until(loop, lambda: loop.run_once(0) or True)
        caller = Caller(loop, host.target)
        run_until(loop, lambda: caller.over)
        assert caller.connection is not None
        assert [is_closed(loop, each) for each in crowd] == [True] * 17 + [False] * 3
        caller.connection.close()
    host.close()


def test_a_silent_stranger_is_closed_and_so_is_one_that_proves_itself_and_stops_there() -> None:
    loop = VirtualLoop()
    host = Host(loop, stranger_seconds=10)
    with strangers(host.target, 2) as (silent, proven):
        said = prove.prove_claim(SECRET, challenge(loop, proven), Claim.new(WORKER, b""))
        proven.sendall(said)
        loop.pass_time(9)
        assert not is_closed(loop, silent) and not is_closed(loop, proven)
        loop.pass_time(2)
        assert is_closed(loop, silent) and is_closed(loop, proven)
    host.close()


def test_a_listener_that_was_busy_gives_those_time_whom_it_has_not_answered() -> None:
    loop = VirtualLoop()
    host = Host(loop, stranger_seconds=10)
    with strangers(host.target, 2) as (silent, honest):
        first = challenge(loop, honest)
        honest.sendall(prove.prove_claim(SECRET, first, Claim.new(WORKER, b"")))
        loop.pass_time(25)  # In one turn, as its thread was elsewhere.
        honest.sendall(prove.GO)
        loop.pass_time(9)
        assert len(host.accepted) == 1 and not is_closed(loop, silent)
        loop.pass_time(2)
        assert is_closed(loop, silent)
    host.close()


def test_without_descriptors_the_oldest_stranger_makes_room() -> None:
    loop = Loop()
    host = Host(loop)
    with strangers(host.target, 3) as crowd:
        challenge(loop, crowd[2])
        waiting = socket.socket()
        with no_free_descriptor():
            waiting.connect(host.target.address)
            assert challenge(loop, waiting).software == prove.OURS
        assert is_closed(loop, crowd[0]) and not is_closed(loop, crowd[1])
        waiting.close()
    host.close()


def test_without_any_descriptor_a_listener_waits_without_spinning_and_goes_on() -> None:
    loop = Loop()
    host = Host(loop)
    waiting = socket.socket()
    with no_free_descriptor():
        waiting.connect(host.target.address)
        turns, cpu, end = 0, time.process_time(), time.monotonic() + 0.3
        while time.monotonic() < end:
            loop.run_once(end - time.monotonic())
            turns += 1
        assert turns < 10
    assert challenge(loop, waiting).software == prove.OURS
    assert time.process_time() - cpu < 5
    waiting.close()
    host.close()


def test_a_listener_takes_exactly_the_bytes_of_a_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an endless stranger sends stays in the kernel."""
    monkeypatch.setattr(prove, "is_claim", lambda beginning: True)
    loop = Loop()
    host = Host(loop)
    with strangers(host.target, 1) as [endless]:
        endless.setblocking(False)
        sent = 0
        for _ in range(2000):
            try:
                sent += endless.send(b"x" * 65536)
            except (BlockingIOError, ConnectionError):
                break
            loop.run_once(0)
        assert is_closed(loop, endless)
    assert host.refused[0][0] == prove.OTHER_SECRET
    host.close()


def test_a_dial_takes_the_address_where_the_right_one_proves_itself() -> None:
    loop = Loop()
    right, other_job = Host(loop), Host(loop, party=Party(b"other", "server", "worker"))
    with tcp() as silent, tcp() as nobody:
        unused = target(nobody)
        nobody.close()
        caller = Caller(loop, target(silent), unused, other_job.target, right.target)
        run_until(loop, lambda: caller.over and right.accepted)
        assert caller.reached == right.target and not other_job.accepted
        assert caller.connection is not None
        caller.connection.close()
    right.close()
    other_job.close()


def test_a_dial_that_fails_tells_why_for_each_address() -> None:
    loop = Loop()
    other = Host(loop, party=Party(b"other", "server", "worker"))
    with tcp() as silent, tcp() as nobody:
        unused = target(nobody)
        nobody.close()
        caller = Caller(
            loop, target(silent), unused, other.target, limits=LIMITS._replace(prove_seconds=0.5)
        )
        run_until(loop, lambda: caller.over)
        assert caller.failures is not None
        reasons = {failure.target: str(failure) for failure in caller.failures}
        assert "did not say within 0.5 s" in reasons[target(silent)]
        assert "connection refused" in reasons[unused]
        assert "another secret" in reasons[other.target]
    other.close()


def test_a_dial_does_not_parse_what_another_program_says() -> None:
    loop = Loop()
    with tcp() as program:
        caller = Caller(loop, target(program))
        run_until(loop, lambda: is_waiting(program))
        connection, _ = program.accept()
        connection.sendall(
            b"220 mail.example ESMTP ready, and more than a challenge has of bytes" * 2
        )
        run_until(loop, lambda: caller.over)
        connection.close()
    assert caller.failures is not None
    assert isinstance(caller.failures[0].error, ProtocolError)
    assert "another program listens there" in str(caller.failures[0])
