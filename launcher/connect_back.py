"""Agents that connect back to the launcher over TCP, and prove that they are of its job.

The launcher sends a nonce; the agent answers with one of its own, the name of its node, and a proof
that it knows the secret; the launcher sends a proof as well. Each part has a fixed length, and
nothing else is read before. The secret reaches the agent in its environment.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.meeting.address import listen_everywhere, parse_address
from hvdlite.common.meeting.handshake import (
    CONNECTS,
    LISTENS,
    NONCE_BYTES,
    PROOF_BYTES,
    new_nonce,
    proof,
    proves,
)
from hvdlite.launcher.agent_connection import AgentConnection
from hvdlite.launcher.event_loop import EventLoop

SECRET_VARIABLE = "HVDLITE_LAUNCHER_SECRET"
NAME_BYTES = 64
CLAIM_BYTES = NONCE_BYTES + NAME_BYTES + PROOF_BYTES
MOST_STRANGERS = 256
ATTEMPT_SECONDS = 3.0  # For one address: a packet that a firewall drops has no answer.
CONNECT_SECONDS = 30.0  # For all of them.
PAUSE_SECONDS = 0.2


def our_addresses(port: int) -> str:
    """Return the addresses of this host, with `port`, as agents find them in their arguments."""
    name = socket.gethostname()
    hosts = [name]
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        hosts += [str(address[4][0]).partition("%")[0] for address in found]
    hosts.append("127.0.0.1")
    shown = (f"[{host}]" if ":" in host else host for host in dict.fromkeys(hosts))
    return ",".join(f"{host}:{port}" for host in shown)


def pack_name(name: str) -> bytes:
    """Return the name of a node in a fixed length."""
    return name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")


class AgentListener:
    """Accepts the agents of `by_name`, and connects each when its proof holds."""

    def __init__(
        self, loop: EventLoop, secret: bytes, by_name: Mapping[str, AgentConnection]
    ) -> None:
        self._loop, self._secret = loop, secret
        self._agents = {pack_name(name): agent for name, agent in by_name.items()}
        self._listener = listen_everywhere(0)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._strangers: dict[int, _Stranger] = {}
        loop.listen(self._listener.fileno(), self._accept)

    def _accept(self, _fd: int) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._strangers) >= MOST_STRANGERS:
            self._drop(next(iter(self._strangers)))
        stranger = _Stranger(connection)
        self._strangers[connection.fileno()] = stranger
        self._loop.listen(connection.fileno(), self._read)
        connection.send(stranger.nonce)

    def _read(self, fd: int) -> None:
        stranger = self._strangers[fd]
        try:
            data = stranger.connection.recv(CLAIM_BYTES - len(stranger.said))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        stranger.said += data
        if not data:
            self._drop(fd)
        elif len(stranger.said) == CLAIM_BYTES:
            self._judge(stranger)
            self._drop(fd)

    def _judge(self, stranger: _Stranger) -> None:
        nonces = stranger.nonce + stranger.said[:NONCE_BYTES]
        name = stranger.said[NONCE_BYTES:-PROOF_BYTES]
        agent = self._agents.get(name)
        given = stranger.said[-PROOF_BYTES:]
        if not proves(given, self._secret, CONNECTS, nonces, name):
            return
        if agent is None or agent.channel is not None:
            return
        stranger.connection.send(proof(self._secret, LISTENS, nonces, name))
        stranger.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fd = stranger.connection.fileno()
        agent.connect(os.dup(fd), os.dup(fd))

    def _drop(self, fd: int) -> None:
        self._loop.forget(fd)
        self._strangers.pop(fd).connection.close()

    def close(self) -> None:
        """Accept nobody any more."""
        for fd in list(self._strangers):
            self._drop(fd)
        if self._listener.fileno() >= 0:
            self._loop.forget(self._listener.fileno())
            self._listener.close()


class _Stranger:
    """A connection whose proof is not complete."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.nonce = new_nonce()
        self.said = b""


# -- the agent's end


def connect_back(addresses: str, name: str, secret: bytes) -> socket.socket:
    """Return a connection to the launcher at one of its `addresses`.

    Raises `HorovodInternalError` where none of them leads to it.
    """
    end = time.monotonic() + CONNECT_SECONDS
    while True:
        for connection in _attempts(addresses):
            if _is_launcher(connection, name, secret):
                connection.settimeout(None)
                return connection
            connection.close()
        if time.monotonic() > end:
            raise HorovodInternalError(
                f"node {name} reaches the launcher at none of {addresses}: a firewall may be "
                "between, or no network joins them"
            )
        time.sleep(PAUSE_SECONDS)


def _attempts(addresses: str) -> Iterator[socket.socket]:
    for text in addresses.split(","):
        address = parse_address(text, "the address of the launcher")
        with contextlib.suppress(OSError):
            yield socket.create_connection((address.host, address.port), timeout=ATTEMPT_SECONDS)


def _is_launcher(connection: socket.socket, name: str, secret: bytes) -> bool:
    """Prove who we are, and return whether the other end is our launcher."""
    claim = pack_name(name)
    try:
        nonces = _read(connection, NONCE_BYTES) + (own := new_nonce())
        connection.sendall(own + claim + proof(secret, CONNECTS, nonces, claim))
        return proves(_read(connection, PROOF_BYTES), secret, LISTENS, nonces, claim)
    except OSError:
        return False


def _read(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("the launcher has closed the connection")
        data += part
    return data
