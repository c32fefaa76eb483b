"""The choice of addresses: where a rank listens, and in which order its peers try these places.

This module never opens a socket.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.networks import BRIDGE
from hvdlite.common.connections.address import Target
from hvdlite.common.transport.tcp.interfaces import Interface


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
