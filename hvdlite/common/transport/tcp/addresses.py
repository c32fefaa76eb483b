"""The choice of addresses: where a rank listens, and in which order its peers try these places.

What a rank tells all others before they connect is its card, which the exchange hands on. This
module never opens a socket.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgpack

from hvdlite.common.base.errors import HorovodInternalError, ProtocolError
from hvdlite.common.base.networks import BRIDGE, Interface, list_interfaces
from hvdlite.common.connections.address import Target
from hvdlite.common.meeting.exchange import Exchange

KEY_BYTES = 32


class Endpoint(NamedTuple):
    """A place where a rank listens."""

    address: str
    prefix: int
    port: int


def choose(
    interfaces: Iterable[Interface], wanted: Sequence[str], *, one_machine: bool
) -> list[Interface]:
    """Return where this rank listens.

    `wanted` are names of interfaces, addresses and subnets (CIDR). Without them these are all that
    are up but the loopback and bridges inside the host; only the loopback if the whole job runs on
    `one_machine`. Raises `HorovodInternalError` with what there is if nothing is left.
    """
    usable = [interface for interface in interfaces if interface.up]
    if wanted:
        chosen = [each for each in usable if any(_matches(each, word) for word in wanted)]
        if not chosen:
            raise HorovodInternalError(
                f"HVDLITE_NETWORK_INTERFACES={','.join(wanted)}: no interface of this host matches "
                f"that is up; there are {_listed(usable)}"
            )
        return _without_link_local(chosen)
    if one_machine and (loopback := [each for each in usable if each.loopback]):
        return loopback[:1]
    outer = [each for each in usable if not each.loopback]
    if not outer:
        raise HorovodInternalError(
            "the job runs on several hosts, but this one has no network: the interfaces that are "
            f"up are {_listed(usable)}"
        )
    return _without_link_local([each for each in outer if not BRIDGE.fullmatch(each.name)] or outer)


def _matches(interface: Interface, word: str) -> bool:
    """Return whether `word` names `interface`, or the subnet of its address."""
    try:
        return ipaddress.ip_address(interface.address) in ipaddress.ip_network(word, strict=False)
    except ValueError:
        return interface.name == word


def _without_link_local(interfaces: list[Interface]) -> list[Interface]:
    """Leave out addresses that are valid on one link only, unless there is nothing else."""
    return [
        i for i in interfaces if not ipaddress.ip_address(i.address).is_link_local
    ] or interfaces


def _listed(interfaces: Iterable[Interface]) -> str:
    return ", ".join(f"{i.name} ({i.address}/{i.prefix})" for i in interfaces) or "none"


def order(mine: Sequence[Interface], theirs: Sequence[Endpoint]) -> list[Target]:
    """Return what to try to reach a peer, in this order.

    First the endpoints in a subnet of `mine` (all interfaces of this host), then others; last those
    whose address this host has itself, where another rank of this host may answer. Each must prove
    who it is in any case.
    """
    own = {interface.address for interface in mine}
    scopes = list(dict.fromkeys(interface.scope for interface in mine if interface.scope))
    subnets = [_subnet(interface.address, interface.prefix) for interface in mine]

    def distance(endpoint: Endpoint) -> int:
        if endpoint.address in own:
            return 2
        return 0 if _subnet(endpoint.address, endpoint.prefix) in subnets else 1

    return [
        target for endpoint in sorted(theirs, key=distance) for target in _targets(endpoint, scopes)
    ]


def _targets(endpoint: Endpoint, scopes: Sequence[int]) -> list[Target]:
    """Return how to connect to `endpoint`: a link-local address once for each own link."""
    address, port = endpoint.address, endpoint.port
    version = ipaddress.ip_address(address).version
    if version == 4:
        return [Target(socket.AF_INET, (address, port))]
    if not ipaddress.ip_address(address).is_link_local:
        return [Target(socket.AF_INET6, (address, port, 0, 0))]
    return [Target(socket.AF_INET6, (address, port, 0, scope)) for scope in scopes]


def _subnet(address: str, prefix: int) -> object:
    return ipaddress.ip_network(f"{address}/{prefix}", strict=False)


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
        host = os.environ.get("HVDLITE_HOST_NAME") or socket.gethostname()
        return cls(host, local, endpoints, streams, os.urandom(KEY_BYTES), failure)

    def pack(self) -> bytes:
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
