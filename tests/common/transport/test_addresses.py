"""The choice of addresses: where ranks listen, and where their peers try to reach them."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.networks import Interface, list_interfaces
from hvdlite.common.connections.address import Target
from hvdlite.common.transport.tcp.addresses import Endpoint, choose, order

LO = Interface("lo", "127.0.0.1", 8, loopback=True)
LO6 = Interface("lo", "::1", 128, loopback=True)
ETH0 = Interface("eth0", "10.1.0.5", 24)
ETH0_6 = Interface("eth0", "fd00::5", 64)
LINK = Interface("eth0", "fe80::5", 64, scope=2)
ETH1 = Interface("eth1", "192.168.7.5", 16)
DOWN = Interface("eth2", "10.9.0.5", 24, up=False)
DOCKER = Interface("docker0", "172.17.0.1", 16)
ALL = [LO, LO6, ETH0, ETH0_6, LINK, ETH1, DOWN, DOCKER]


@pytest.mark.parametrize(
    ("wanted", "one_machine", "chosen"),
    [
        ((), False, [ETH0, ETH0_6, ETH1]),
        ((), True, [LO]),
        (("eth1",), False, [ETH1]),
        (("eth1",), True, [ETH1]),
        (("eth1", "eth7"), False, [ETH1]),  # another host may have an eth7
        (("10.1.0.0/16",), False, [ETH0]),
        (("10.1.0.5",), False, [ETH0]),
        (("fd00::/8",), False, [ETH0_6]),
        (("192.168.7.9/16", "lo"), False, [LO, LO6, ETH1]),
        (("docker0",), False, [DOCKER]),
        (("fe80::/64",), False, [LINK]),
    ],
)
def test_where_a_rank_listens(
    wanted: tuple[str, ...], one_machine: bool, chosen: list[Interface]
) -> None:
    assert choose(ALL, wanted, one_machine=one_machine) == chosen


@pytest.mark.parametrize("name", ["docker0", "virbr0", "br-0123456789ab", "cni0", "veth1a2b"])
def test_bridges_inside_a_host_are_used_if_there_is_nothing_else(name: str) -> None:
    bridge = Interface(name, "172.18.0.1", 16)
    assert choose([LO, bridge, ETH0], (), one_machine=False) == [ETH0]
    assert choose([LO, bridge], (), one_machine=False) == [bridge]


@pytest.mark.parametrize("name", ["br-lan", "br0", "bridge0", "bond0", "ens5", "tap0", "ib0"])
def test_other_names_are_networks(name: str) -> None:
    interface = Interface(name, "10.2.0.1", 16)
    assert choose([interface, ETH0], (), one_machine=False) == [interface, ETH0]


def test_an_address_of_the_link_is_used_if_there_is_nothing_else() -> None:
    assert choose([LO, LINK], (), one_machine=False) == [LINK]


def test_an_interface_that_does_not_exist_is_an_error_that_lists_those_that_do() -> None:
    with pytest.raises(HorovodInternalError, match=r"INTERFACES=ib0.*eth0 \(10.1.0.5/24\)"):
        choose(ALL, ("ib0",), one_machine=False)
    with pytest.raises(HorovodInternalError, match=r"no network.*lo"):
        choose([LO, DOWN], (), one_machine=False)


def v4(address: str, port: int = 5) -> Target:
    return Target(socket.AF_INET, (address, port))


def test_a_common_subnet_is_tried_first_and_an_own_address_last() -> None:
    theirs = [
        Endpoint("172.17.0.1", 16, 5),
        Endpoint("10.8.0.6", 24, 5),
        Endpoint("192.168.99.6", 16, 5),
        Endpoint("fd00::6", 64, 5),
    ]
    assert order([ETH0, ETH0_6, ETH1, DOCKER], theirs) == [
        v4("192.168.99.6"),
        Target(socket.AF_INET6, ("fd00::6", 5, 0, 0)),
        v4("10.8.0.6"),
        v4("172.17.0.1"),
    ]


def test_an_address_of_a_link_is_tried_once_on_each_link() -> None:
    other_link = Interface("eth1", "fe80::15", 64, scope=7)
    got = order([LINK, LINK._replace(address="fe80::25"), other_link], [Endpoint("fe80::6", 64, 5)])
    assert got == [Target(socket.AF_INET6, ("fe80::6", 5, 0, scope)) for scope in (2, 7)]
    assert order([ETH0], [Endpoint("fe80::6", 64, 5)]) == []


def test_a_target_is_spelled_as_users_write_it() -> None:
    assert str(v4("10.1.0.6", 80)) == "10.1.0.6:80"
    assert str(Target(socket.AF_INET6, ("fd00::6", 80, 0, 0))) == "[fd00::6]:80"


def test_the_interfaces_of_this_machine() -> None:
    found = list_interfaces()
    assert {interface.name for interface in found} <= {name for _, name in socket.if_nameindex()}
    loopback = next(interface for interface in found if interface.address == "127.0.0.1")
    assert (loopback.prefix, loopback.loopback, loopback.up) == (8, True, True)
    for interface in found:
        ipaddress.ip_interface(f"{interface.address}/{interface.prefix}")
        if ":" in interface.address or interface.loopback:
            continue
        with socket.socket() as probe:  # The kernel agrees that the address is its own.
            probe.bind((interface.address, 0))
