"""Addresses of meetings: where rank 0 listens, and what other programs there do."""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Any

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.connections import address as module
from hvdlite.common.connections.address import Address, connect, is_here, listen, parse_address
from hvdlite.common.meeting.launch import MASTER, Launch
from hvdlite.common.meeting.meet import meet
from tests.common.meeting.serving import all_sockets_closed


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let the name "node1" stand for `addresses`; for none, it does not resolve."""
    resolve = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, *args: Any, **options: Any) -> Any:
        if host != "node1":
            return resolve(host, port, *args, **options)
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [found for each in addresses for found in resolve(each, port, *args, **options)]

    monkeypatch.setattr(module.socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize("text", ["unix:/a b/c", "node1:22", "10.0.0.1:65535", "[fe80::1%eth0]:1"])
def test_an_address_is_spelled_as_it_was_parsed(text: str) -> None:
    assert str(parse_address(text, "HVDLITE_RENDEZVOUS")) == text


@pytest.mark.parametrize(
    ("addresses", "bound"),
    [
        (("127.0.0.1",), ("::", "0.0.0.0")),  # as a hostname in /etc/hosts
        (("192.0.2.7",), ("::", "0.0.0.0")),  # of a gateway that translates
        ((), ("::", "0.0.0.0")),  # of a pod that is not ready
    ],
)
def test_a_name_that_is_no_address_of_this_host_is_reached_all_the_same(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...], bound: tuple[str, ...]
) -> None:
    resolving(monkeypatch, *addresses)
    with listen(Address("node1", 0)) as listener:
        assert listener.getsockname()[0] in bound
        connect(Address("127.0.0.1", listener.getsockname()[1]), 5).close()


def test_an_address_of_this_host_alone_is_bound() -> None:
    with listen(Address("127.0.0.2", 0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.2"
        with pytest.raises(ConnectionRefusedError):
            connect(Address("127.0.0.1", listener.getsockname()[1]), 5)


def test_which_address_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, "192.0.2.7")
    assert is_here(Address("127.0.0.1", 1)) and not is_here(Address("node1", 1))


def test_a_part_of_the_ranks_without_rank_0_needs_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, "192.0.2.7")
    launch = Launch(MASTER, 2, 4, addresses=(Address("node1", 29500),), rank_0_serves=True)
    with pytest.raises(ConfigError, match=r"comm=\[2, 3\] leaves out rank 0.*hvdlite-run or torch"):
        meet(launch, [2, 3], b"", time.monotonic() + 5)


def test_a_connection_that_is_reset_at_once_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a server that ends, or by one whose queue is full."""
    with listen(Address("127.0.0.1", 0)) as listener:
        create = socket.create_connection

        def create_and_reset(*arguments: Any, **options: Any) -> socket.socket:
            connection = create(*arguments, **options)
            accepted, _ = listener.accept()
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            accepted.close()
            select.select([connection], [], [], 10)
            return connection

        monkeypatch.setattr(module.socket, "create_connection", create_and_reset)
        with all_sockets_closed(), pytest.raises(OSError):
            connect(Address("127.0.0.1", listener.getsockname()[1]), 5)
