"""Addresses at which processes of a cluster reach each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdlite.ps.connections.channel import Caller, Listener, new_context
from hvdlite.ps.connections.messages import Message


@pytest.mark.parametrize("host", ["[::1]", "127.0.0.1"])
def test_a_listener_is_reached_by_both_versions_of_the_protocol(host: str) -> None:
    context = new_context()
    try:
        listener = Listener(context, f"tcp://{host}:*")
    except Exception as error:
        if host == "[::1]" and not Path("/proc/net/if_inet6").exists():
            pytest.skip(f"this host has no IPv6: {error}")
        raise
    caller = Caller(context, listener.address, b"a peer")
    caller.send(Message("beat", 5))
    received = listener.receive(5.0)
    caller.close()
    listener.close()
    context.term()
    assert received is not None and received[1].request == 5
