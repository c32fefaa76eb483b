"""What must hold of ranks that have met, and of whom they take for one of the job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.connections.dial import Dial
from hvdlite.common.connections.listener import Listener
from hvdlite.common.decisions.control_tree import Tree
from tests.simulation.start.net import Node
from tests.simulation.start.visitors import STRANGERS
from tests.simulation.world import BrokenError

if TYPE_CHECKING:
    from tests.simulation.start.starting import Starting

AGREE, PROGRESS, ENDS, LEFT = (
    "all ranks find the same addresses",
    "nobody waits for what can never come",
    "the job ends by the rules",
    "no process, file or descriptor is left",
)


class Rank:
    """A rank that starts."""

    def __init__(self, number: int, node: Node) -> None:
        self.number, self.node = number, node
        self.begun = 0.0
        self.error: Exception | None = None
        self.ended = self.connected = self.killed = False
        self.cards: Sequence[Any] = ()


@contextmanager
def watched() -> Iterator[None]:
    """Look at who gets in, and at whom an end takes for the one that it has called."""
    real_let_in, real_won = Listener.let_in, Dial.won

    def let_in(listener: Listener, guest: Any, claim: Any) -> None:
        _check_other_end(guest.connection)
        real_let_in(listener, guest, claim)

    def won(dial: Dial, attempt: Any) -> None:
        _check_other_end(attempt.connection)
        real_won(dial, attempt)

    with patch.object(Listener, "let_in", let_in), patch.object(Dial, "won", won):
        yield


def _check_other_end(connection: Any) -> None:
    own, peer = connection.node, connection.peer.node
    if peer.is_stranger != own.is_stranger:
        broken = BrokenError(STRANGERS, f"{own.name} takes {peer.name} for one of the job")
        own.net.fail(None, broken)  # Those who handle the errors of a thread might go on.
        raise broken


def look_at(starting: Starting, rank: Rank, transport: Any) -> None:
    """Check what a rank has found, and let it speak with its neighbours on other hosts."""
    if transport.topology != starting.topology:
        raise BrokenError(AGREE, f"{rank.node.name} finds {transport.topology.hosts}")
    rank.cards = transport._connections._targets.__self__._cards
    for other, card in zip(starting.ranks, rank.cards, strict=True):
        if not (other.killed or other.error or other.number in starting.doubled):
            _check_card(starting, rank, other, card)
    local = starting.topology.peers(rank.number)
    near = Tree(starting.topology, rank.number, starting.fan_out).neighbours
    far = sorted(near - {*local}) if not starting.doubled else []
    for each in far:
        found = transport.control.expect(each)._link._connection.peer
        if found is not None and found.node is not starting.ranks[each].node:
            raise BrokenError(STRANGERS, f"{rank.node.name} has {found.node.name} as {each}")
        transport.send(each, b"%d" % rank.number)
    while far:
        for message in transport.receive(starting.start.limit_seconds):
            if message.body is None and starting.may_fail:
                raise HorovodInternalError(f"rank {message.rank} is lost", message.rank)
            if message.body != b"%d" % message.rank or message.rank not in far:
                raise BrokenError(AGREE, f"{rank.node.name} hears {message}")
            far.remove(message.rank)


def _check_card(starting: Starting, rank: Rank, other: Rank, card: Any) -> None:
    for endpoint in card.endpoints:
        listener = starting.net.listening.get((endpoint.address, endpoint.port))
        if listener is None or listener.node is not other.node:
            there = "nobody" if listener is None else listener.node.name
            text = f"{rank.node.name} finds rank {other.number} where {there} listens"
            raise BrokenError(AGREE, text)
