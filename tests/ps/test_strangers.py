"""What strangers and broken members send ends nobody, and changes nothing for the others."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hvdlite.common.connections import prove
from hvdlite.common.connections.listener import MOST_STRANGERS
from hvdlite.ps.connections import channel
from tests.ps.cluster import Cluster, NewCluster, bits, train_in_one, with_one
from tests.ps.hostile import attack, begin, claim_with, rogues
from tests.ps.test_door import address_of, address_of_scheduler, peer_of

WHERE = [lambda cluster: address_of(cluster, 0), address_of_scheduler]
ENDLESS = 64 << 20


@pytest.mark.parametrize("seed", [7, 8])
def test_no_message_ends_a_server_or_the_scheduler(new_cluster: NewCluster, seed: int) -> None:
    attack(new_cluster(2, 1), 60, 400, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_no_message_ends_anybody_in_a_hundred_thousand(new_cluster: NewCluster, seed: int) -> None:
    attack(new_cluster(2, 1), 1000, 10_000, seed)


def test_a_member_believes_nobody_who_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "LONGEST_PAUSE_SECONDS", channel.FIRST_PAUSE_SECONDS)
    rogues(random.Random(7), 30)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("secret", [b"a guess", None])
def test_a_stranger_cannot_fill_the_memory(
    new_cluster: NewCluster, where: Callable[[Cluster], str], secret: bytes | None
) -> None:
    """As one endless message, behind a claim whose proof is wrong, or instead of one."""
    cluster, trainer = with_one(new_cluster, 1)
    with begin(where(cluster)) as stranger:
        claim = b"" if secret is None else claim_with(stranger, secret, "ps server", b"worker 0")
        stranger.sendall(claim)
        sent, part = 0, bytes(1 << 16)
        with pytest.raises(OSError, match=r"reset|[Pp]ipe"):
            while sent < ENDLESS:
                sent += stranger.send(part)
    trainer.train(4)
    assert bits(trainer.values) == train_in_one(4, lambda _step: [0])


@pytest.mark.parametrize("where", WHERE)
def test_silent_connections_keep_nobody_out(
    new_cluster: NewCluster, where: Callable[[Cluster], str]
) -> None:
    """There are few of them at a time: the oldest makes room for who comes."""
    cluster, trainer = with_one(new_cluster, 1)
    held = [begin(where(cluster)) for _ in range(MOST_STRANGERS + 40)]
    try:
        trainer.train(3)
        for each in held[:40]:
            each.settimeout(20)
            with pytest.raises(ConnectionResetError):
                while each.recv(prove.CHALLENGE.size):
                    pass
        with peer_of(cluster, where(cluster)) as member:  # Who comes anew is let in.
            assert member.ask("beat", 1).request == 1
        trainer.train(6)
    finally:
        for each in held:
            each.close()
    assert bits(trainer.values) == train_in_one(6, lambda _step: [0])
