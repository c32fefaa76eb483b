"""TCP: who connects must belong to the job."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.connections import prove
from hvdlite.common.settings.config import Config
from hvdlite.common.transport.base import Incoming
from hvdlite.common.transport.tcp import connections
from hvdlite.common.transport.tcp.connect import connect
from hvdlite.common.transport.tcp.connections import (
    CONTROL,
    DATA,
    OTHER_EPOCH,
    OTHER_RANK,
    TAKEN,
    Identity,
    Slot,
)
from hvdlite.common.transport.tcp.transport import TcpTransport
from tests.common.transport.tcp_worlds import (
    TWO_HOSTS,
    open_pair,
    place_of,
    prove_claim,
    rings,
    train,
)
from tests.ports import free_ports
from tests.ranks import run_threads
from tests.worlds import InProcessMeeting, TcpWorld

pytestmark = pytest.mark.timeout(30)

ATTACKS = (
    b"",
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 10,
    b"\x00\x00\x00\x40" * 40,  # A length of 1 GB.
    bytes(20),  # Half a claim.
    bytes(10_000),
)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed it; waits a little."""
    connection.settimeout(10)
    try:
        while connection.recv(1000):
            pass
    except ConnectionError:
        return True
    return True


def test_foreign_connections_are_closed_and_disturb_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "PROOF_SECONDS", 0.3)
    with open_pair() as (transports, places):
        attacks = [attack for attack in ATTACKS for _ in range(2)]
        strangers = [socket.create_connection(place) for place in places for _ in attacks]
        for stranger, attack in zip(strangers, attacks * 2, strict=True):
            with suppress(ConnectionError):
                stranger.sendall(attack)
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
        while any(transport._connections.listener._strangers for transport in transports):
            assert time.monotonic() < deadline
            run_threads(2, lambda rank: transports[rank].receive(0.01))


def knock_on(transport: TcpTransport, me: Identity, slot: Slot) -> int:
    """What a rank answers to a proven claim of `me`, while it goes on."""
    answers: list[bytes] = []

    def knock() -> None:
        with socket.create_connection(place_of(transport), timeout=10) as connection:
            connection.sendall(prove_claim(connection, me, slot))
            answers.append(connection.recv(1))

    knocking = threading.Thread(target=knock)
    knocking.start()
    while knocking.is_alive():
        transport.receive(0.01)
    return answers[0][0]


@pytest.mark.parametrize(
    ("change", "slot", "answer"),
    [
        ({}, Slot(0, DATA, 0), prove.ACCEPTED),
        ({"key": bytes(32)}, Slot(0, DATA, 0), prove.OTHER_SECRET),
        ({"epoch": 8}, Slot(0, DATA, 0), OTHER_EPOCH),
        ({"rank": 2}, Slot(0, DATA, 0), OTHER_RANK),
        ({"rank": 0}, Slot(0, DATA, 0), OTHER_RANK),
        ({}, Slot(1, DATA, 0), OTHER_RANK),
        ({}, Slot(0, 7, 0), OTHER_RANK),
        ({}, Slot(0, DATA, 200), OTHER_RANK),
        ({}, Slot(0, CONTROL, 0), TAKEN),
    ],
    ids=["right", "key", "epoch", "foreign rank", "itself", "another rank", "channel", "stream",
         "there already"],
)  # fmt: skip
def test_a_claim_must_be_right_in_every_word(
    change: dict[str, Any], slot: Slot, answer: int
) -> None:
    with open_pair(epoch=7, secret=b"s") as (transports, _):
        me = transports[1]._connections.me
        assert (me.rank, me.epoch) == (1, 7)
        assert knock_on(transports[0], Identity(**{**me._asdict(), **change}), slot) == answer
        train(transports)


def test_a_rank_of_another_epoch_is_refused_with_both_epochs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It knows the key of this world: the ranks have met, but count the worlds differently."""
    with open_pair(epoch=7) as (transports, _):
        me = transports[1]._connections.me
        for epoch in (6, 8):
            caplog.clear()
            other = me._replace(epoch=epoch)
            assert knock_on(transports[0], other, Slot(0, DATA)) == OTHER_EPOCH
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
        ports |= {place_of(t)[1] for t in transports}
        for old in late:
            caplog.clear()
            assert knock_on(transports[0], old, Slot(0, DATA)) == prove.OTHER_SECRET
            assert "does not know the secret of this job" in caplog.text
            assert not transports[0]._connections.listener._strangers
        train(transports)
        late.append(transports[1]._connections.me)
        run_threads(2, lambda rank, world=transports: world[rank].close())
    assert ports == {*config.tcp_ports}


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
        with pytest.raises(
            HorovodInternalError, match=r"rank 1 .*cannot reach rank 0.*does not know the secret"
        ):
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
    return {
        guest.connection.getpeername()[1] for guest in transport._connections.listener._strangers
    }


def test_too_many_guests_push_out_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    make_room_for(3, monkeypatch)
    with open_pair() as (transports, places):
        strangers = [socket.create_connection(places[0]) for _ in range(10)]
        for _ in strangers:
            transports[0].receive(0.01)
        assert len(transports[0]._connections.listener._strangers) == 3
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
