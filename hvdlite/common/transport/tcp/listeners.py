"""The sockets on which a rank listens: one for each of its addresses, none for all of them."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.transport.tcp.addresses import Endpoint
from hvdlite.common.transport.tcp.interfaces import Interface

BACKLOG = 1024
# An address that is not ready yet, or on its way out, cannot be bound: others may do.
NOT_READY = (errno.EADDRNOTAVAIL, errno.ENODEV)


def listen_local() -> socket.socket:
    """Listen for ranks of this host, under a name that the kernel gives and forgets with us."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind("")
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def listen_remote(
    interfaces: Sequence[Interface], ports: tuple[int, ...], first: int
) -> list[tuple[Endpoint, socket.socket]]:
    """Listen on the address of every interface.

    `ports` are the first and the last port that may be used (empty: any); the ranks of a host begin
    with different ones, the `first` from the start of the range. Raises `HorovodInternalError`.
    """
    listeners: list[tuple[Endpoint, socket.socket]] = []
    reason = ""
    try:
        for interface in interfaces:
            try:
                listener = _listen(interface, ports, first)
            except OSError as error:
                if error.errno not in NOT_READY:
                    raise
                reason = str(error)
            else:
                port = listener.getsockname()[1]
                endpoint = Endpoint(interface.address, interface.prefix, port)
                listeners.append((endpoint, listener))
        if not listeners:
            addresses = ", ".join(interface.address for interface in interfaces)
            raise HorovodInternalError(f"this rank cannot listen on {addresses}: {reason}")
    except BaseException:
        for _, listener in listeners:
            listener.close()
        raise
    return listeners


def _listen(interface: Interface, ports: tuple[int, ...], first: int) -> socket.socket:
    """Listen on a port of the range that nobody uses."""
    if not ports:
        return _try(interface, 0)
    low, high = ports
    count = high - low + 1
    for step in range(count):
        try:
            return _try(interface, low + (first + step) % count)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    raise HorovodInternalError(
        f"HVDLITE_TCP_PORTS={low}-{high}: all {count} ports of {interface.address} are in use; "
        "every rank of a host needs one: give a longer range"
    )


def _try(interface: Interface, port: int) -> socket.socket:
    version6 = ":" in interface.address
    family = socket.AF_INET6 if version6 else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # The kernel keeps the port of a connection that has ended for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        scoped = (0, interface.scope) if version6 else ()
        listener.bind((interface.address, port, *scoped))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
