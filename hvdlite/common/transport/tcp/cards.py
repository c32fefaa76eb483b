"""What a rank tells all others before they connect: its card. Cards come from the exchange."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

import msgpack

from hvdlite.common.base.errors import HorovodInternalError, ProtocolError
from hvdlite.common.connections.address import Target
from hvdlite.common.meeting.exchange import Exchange
from hvdlite.common.transport.tcp.addresses import Endpoint, order
from hvdlite.common.transport.tcp.interfaces import list_interfaces

KEY_BYTES = 32


class Card(NamedTuple):
    """What the others need to know of a rank."""

    host: str  # For messages.
    local: bytes  # Where it listens for ranks of its host; empty if there are none.
    endpoints: Sequence[Endpoint]  # Where it listens for other hosts.
    streams: int  # Those of rank 0 are used by all.
    nonce: bytes  # Random. That of rank 0 makes the key of the job, with the secret.
    failure: str = ""  # Why it cannot listen.

    @classmethod
    def new(cls, local: bytes, endpoints: Sequence[Endpoint], streams: int, failure: str) -> Card:
        """Return the card of this rank."""
        host = os.environ.get("HVDLITE_HOST_NAME") or socket.gethostname()
        return cls(host, local, endpoints, streams, os.urandom(KEY_BYTES), failure)

    def pack(self) -> bytes:
        """Return the card as bytes."""
        endpoints = [
            (ipaddress.ip_address(each.address).packed, each.prefix, each.port)
            for each in self.endpoints
        ]
        packed: bytes = msgpack.packb([*({**self._asdict(), "endpoints": endpoints}.values())])
        return packed

    @classmethod
    def unpack(cls, body: bytes, rank: int) -> Card:
        """Return the card of `rank`. Raises `ProtocolError`."""
        try:
            card = cls(*msgpack.unpackb(body))
            endpoints = [
                Endpoint(str(ipaddress.ip_address(a)), *rest) for a, *rest in card.endpoints
            ]
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ProtocolError(f"rank {rank} gave a card that cannot be read: {error}") from error
        return card._replace(endpoints=endpoints)


def exchange_cards(
    exchange: Exchange, card: Card, failure: HorovodInternalError | None = None
) -> list[Card]:
    """Return the cards of all ranks. Raises `HorovodInternalError` on all ranks if one has failed.

    `failure` is why this rank has not found those of its host; a card tells why it cannot listen.
    """
    if failure is not None:
        card = card._replace(failure=str(failure))
    cards = [Card.unpack(body, rank) for rank, body in enumerate(exchange.allgather(card.pack()))]
    if failure is not None:
        raise failure
    for rank, each in enumerate(cards):
        if each.failure:
            raise HorovodInternalError(f"rank {rank} ({each.host}): {each.failure}", rank)
    return cards


class AddressBook:
    """Where to reach every rank, by its card."""

    def __init__(self, local: Sequence[int], cards: Sequence[Card]) -> None:
        self._local = frozenset(local)  # The ranks of this host.
        self._cards = cards
        self._interfaces = [interface for interface in list_interfaces() if interface.up]

    def targets(self, rank: int) -> list[Target]:
        """Return what to try to reach `rank`, in this order."""
        card = self._cards[rank]
        if rank in self._local:
            return [Target(socket.AF_UNIX, card.local)]
        return order(self._interfaces, card.endpoints)
