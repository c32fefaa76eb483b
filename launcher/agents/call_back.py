"""How agents that one program has started on many hosts, such as srun, connect with the launcher.

    launcher: Listener(loop, hosts, accepted)     agent: call_back(addresses, secret, name)

Such a program has no pipe to each agent, so that an agent connects back over TCP. Both ends prove
that they know the job's secret before anything else is read. The secret goes through the
environment, never through a command line.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence

from hvdlite.common.connections.address import (
    Address,
    listen,
    listen_everywhere,
    parse_address,
)
from hvdlite.common.connections.dial import Failure, Limits, reach
from hvdlite.common.connections.listener import Listener as ProvenListener
from hvdlite.common.connections.loop import Loop
from hvdlite.common.connections.prove import Party

SECRET_VARIABLE = "HVDLITE_LAUNCHER_SECRET"
NAMED_BY_VARIABLE = "HVDLITE_LAUNCHER_NAMED_BY"  # The variable by whose text an agent calls itself.
MOST_STRANGERS = 4096  # So many may be about to prove who they are.
TRY_SECONDS = 3.0  # To connect to one address.
CALL_SECONDS = 30.0
PROBE_PORT = 9  # Of datagrams that are never sent.


def receiver(secret: str) -> Party:
    """Return the end of the launcher."""
    return Party(secret.encode(), "launcher", "agent")


class Listener:
    """The launcher's end. `accepted` gets each proven connection, and the agent's name."""

    def __init__(
        self, loop: Loop, hosts: Iterable[str], accepted: Callable[[socket.socket, str], None]
    ) -> None:
        self.secret = secrets.token_hex(16)
        sockets = [listen(Address(address, 0)) for address in own_addresses(hosts)]
        self._sockets = sockets or [listen_everywhere(0)]
        self._listener = ProvenListener(
            loop, self._sockets, receiver(self.secret),
            lambda claim, connection: accepted(connection, os.fsdecode(claim.body)),
            most_strangers=MOST_STRANGERS,
        )  # fmt: skip

    @property
    def addresses(self) -> list[str]:
        """Where agents connect to: one of these is this host, seen from theirs."""
        texts = []
        for each in self._sockets:
            host, port, *_ = each.getsockname()
            name = socket.gethostname() if host in ("::", "0.0.0.0") else host
            texts.append(str(Address(name, port)))
        return texts

    def close(self) -> None:
        """Accept nobody any more; connections that were accepted stay."""
        self._listener.close()


def own_addresses(hosts: Iterable[str]) -> list[str]:
    """Return the addresses of this host from which it reaches `hosts`; empty if no name resolves.

    A host that is this one leads to loopback, which is an address as any other: the agent of this
    host uses it, and to the others it is one that does not answer with a proof.
    """
    found: dict[str, None] = {}
    for host in hosts:
        with contextlib.suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(
                host, PROBE_PORT, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                found[probe.getsockname()[0]] = None
    return list(found)


def call_back(
    addresses: Sequence[str], secret: str, name: str, seconds: float = CALL_SECONDS,
    try_seconds: float = TRY_SECONDS,
) -> socket.socket:  # fmt: skip
    """Return the agent's connection with the launcher, which both ends have proven; it blocks.

    The addresses, such as ``10.0.0.1:4321``, are tried, again and again for `seconds`. Raises
    `OSError` that tells of each address why not.
    """
    loop = Loop()
    deadline = loop.now() + seconds
    found = [parse_address(text, "the launcher's address") for text in addresses]

    def failed(failures: list[Failure]) -> None:
        if loop.now() >= deadline:
            why = "; ".join(map(str, failures))
            raise OSError(f"cannot connect with the launcher ({why})")

    try:
        connection = reach(
            loop, found, Party(secret.encode(), "agent", "launcher"), os.fsencode(name),
            lambda: Limits(try_seconds, try_seconds), failed,
        )  # fmt: skip
    finally:
        loop.close()
    connection.setblocking(True)
    return connection
