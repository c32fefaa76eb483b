"""Addresses at which processes of a cluster reach each other."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.connections.address import Address
from hvdlite.ps.cluster.settings import SCHEDULER, SERVER
from hvdlite.ps.connections.channel import Caller, Listener
from hvdlite.ps.connections.messages import Message
from tests.ps.peers import LIMIT_SECONDS, Peer


@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
def test_a_listener_is_reached_by_both_versions_of_the_protocol(host: str) -> None:
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this host has no IPv6")
    listener = Listener(Address(host), SERVER)
    peer = Peer(listener.address, SERVER, token=b"")
    peer.caller.connected = lambda: peer.caller.send(Message("beat", 5))
    received = None
    while received is None:
        peer.caller.flush()
        peer.loop.run_once(0.01)
        received = listener.receive(0.01)
    peer.close()
    listener.close()
    assert received[1].request == 5


def test_a_slow_name_server_holds_up_no_other_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, resolve = threading.Event(), socket.getaddrinfo

    def slow(host: str, *words: Any, **more: Any) -> Any:
        if host == "slow.example":
            assert answers.wait(LIMIT_SECONDS)
            host = "127.0.0.1"
        return resolve(host, *words, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    listener = Listener(Address("127.0.0.1"), SERVER)
    thread = threading.Thread(target=serve, args=(listener, ended := threading.Event()))
    thread.start()
    peer = Peer(listener.address, SERVER, token=b"")
    port = listener.address.rpartition(":")[2]
    named = Caller(peer.loop, f"slow.example:{port}", SERVER, b"worker of a name")
    peer.wait(lambda: peer.caller.takes)
    assert not named.takes
    answers.set()
    peer.wait(lambda: named.takes)
    named.close()
    peer.close()
    ended.set()
    thread.join(LIMIT_SECONDS)
    listener.close()


def serve(listener: Listener, ended: threading.Event) -> None:
    while not ended.is_set():
        listener.receive(0.05)


def test_without_a_token_nobody_listens_where_other_hosts_come() -> None:
    with pytest.raises(ConfigError, match="is not the loopback interface: set HVDLITE_PS_TOKEN"):
        Listener(Address(), SCHEDULER)
    Listener(Address(), SCHEDULER, b"a secret").close()
