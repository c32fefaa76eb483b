"""Both ends of meetings at a server, for tests."""

from __future__ import annotations

import contextlib
import gc
import socket
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from hvdlite.common.connections.address import Address, parse_address
from hvdlite.common.meeting.client import Participant, ServerExchange
from hvdlite.common.meeting.meet import HostedExchange


def at_server(address: str | Address | Sequence[Address], *me: Any, **more: Any) -> ServerExchange:
    """The exchange at a server; see `Participant` for the arguments."""
    if isinstance(address, str):
        address = parse_address(address, "the test")
    addresses = [address] if isinstance(address, Address) else address
    return ServerExchange(addresses, Participant(*me, **more))


def hosting(listener: socket.socket, *me: Any, **more: Any) -> HostedExchange:
    """The exchange of a rank that serves at `listener`; see `Participant` for the arguments."""
    return HostedExchange(listener, Participant(*me, **more))


@contextlib.contextmanager
def all_sockets_closed() -> Iterator[None]:
    """See that no socket is left to the garbage collector."""
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        yield
        gc.collect()
    assert not caught, [str(each.message) for each in caught]
