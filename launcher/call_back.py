"""How agents that one program has started on many hosts, such as srun, connect with the launcher.

    launcher: Listener(loop, hosts, accepted)     agent: call_back(addresses, secret, name)

Such a program has no pipe to each agent, so that an agent connects back over TCP. Both ends prove
that they know the job's secret before anything else is read:

| the launcher        | the agent                                  |
|---------------------|--------------------------------------------|
| nonce               |                                            |
|                     | nonce, length of its name, its name, proof |
| proof               |                                            |

The secret goes through the environment, never through a command line.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import partial
from typing import Protocol

from hvdlite.common.connections.address import (
    EXHAUSTED,
    Address,
    connect,
    listen,
    listen_everywhere,
)
from hvdlite.common.connections.address import parse_address as parse
from hvdlite.common.meeting import handshake
from hvdlite.common.meeting.handshake import NONCE_BYTES, PROOF_BYTES

SECRET_VARIABLE = "HVDLITE_LAUNCHER_SECRET"
NAMED_BY_VARIABLE = "HVDLITE_LAUNCHER_NAMED_BY"  # The variable by whose text an agent calls itself.
HELLO_BYTES = NONCE_BYTES + 1  # The agent's nonce, and the length of its name.
MOST_STRANGERS = 4096  # So many may be about to prove who they are.
STRANGER_SECONDS = 10.0
TRY_SECONDS = 3.0  # To connect to one address.
CALL_SECONDS = 30.0
PROBE_PORT = 9  # Of datagrams that are never sent.
EXHAUSTED_SECONDS = 0.05  # To wait then, where nothing else can be done.


class Loop(Protocol):
    """What is used of the launcher's event loop."""

    def listen(self, fd: int, handler: Callable[[int], None]) -> None:
        """Call `handler` whenever `fd` can be read."""

    def forget(self, fd: int) -> None:
        """Stop waiting for `fd`."""


class Listener:
    """The launcher's end. `accepted` gets each proven connection, and the agent's name."""

    def __init__(
        self, loop: Loop, hosts: Iterable[str], accepted: Callable[[socket.socket, str], None]
    ) -> None:
        self.secret = secrets.token_hex(16)
        self._loop, self._accepted = loop, accepted
        self._strangers: dict[int, _Stranger] = {}
        self._listeners = [_listen(address) for address in own_addresses(hosts)]
        self._listeners = self._listeners or [listen_everywhere(0)]
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for listener in self._listeners:
            listener.setblocking(False)
            loop.listen(listener.fileno(), partial(self._accept, listener))

    @property
    def addresses(self) -> list[str]:
        """Where agents connect to: one of these is this host, seen from theirs."""
        texts = []
        for listener in self._listeners:
            host, port, *_ = listener.getsockname()
            name = socket.gethostname() if host in ("::", "0.0.0.0") else host
            texts.append(str(Address(name, port)))
        return texts

    @property
    def variables(self) -> dict[str, str]:
        """What the environment of the agents has to have."""
        return {SECRET_VARIABLE: self.secret}

    def _accept(self, listener: socket.socket, _fd: int) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:  # Else it has gone again.
            if error.errno in EXHAUSTED:
                self._send_away(listener)
            return
        self._forget_the_late()
        if len(self._strangers) >= MOST_STRANGERS:
            connection.close()
            return
        stranger = _Stranger(connection, self.secret.encode())
        self._strangers[connection.fileno()] = stranger
        self._loop.listen(connection.fileno(), self._hear)

    def _send_away(self, listener: socket.socket) -> None:
        """Close a connection that cannot be served, or the loop would call again at once for it.

        An agent tries again. The file descriptor for this moment is one that is held in reserve.
        """
        if self._reserve < 0:
            time.sleep(EXHAUSTED_SECONDS)
        else:
            os.close(self._reserve)
            self._reserve = -1
            with contextlib.suppress(OSError):
                listener.accept()[0].close()
        with contextlib.suppress(OSError):
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _hear(self, fd: int) -> None:
        stranger = self._strangers[fd]
        name = stranger.hear()
        if name is None and stranger.open:
            return
        self._loop.forget(fd)
        del self._strangers[fd]
        if name is None:
            stranger.connection.close()
        else:
            self._accepted(stranger.connection, name)

    def _forget_the_late(self) -> None:
        now = time.monotonic()
        for fd, stranger in list(self._strangers.items()):
            if now >= stranger.deadline:
                self._loop.forget(fd)
                stranger.connection.close()
                del self._strangers[fd]

    def close(self) -> None:
        """Accept nobody any more; connections that were accepted stay."""
        for sock in (*self._listeners, *(each.connection for each in self._strangers.values())):
            self._loop.forget(sock.fileno())
            sock.close()
        self._listeners, self._strangers = [], {}
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1


class _Stranger:
    """A connection whose other end has not proven yet that it is an agent of this job."""

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        self.connection = connection
        self.open = True
        self.deadline = time.monotonic() + STRANGER_SECONDS
        self._secret, self._nonce, self._input = secret, handshake.new_nonce(), b""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send(self._nonce)

    def _send(self, data: bytes) -> None:
        try:
            self.open = self.connection.send(data) == len(data)
        except OSError:
            self.open = False

    def hear(self) -> str | None:
        """Read on; return the agent's name once it is proven."""
        wanted = HELLO_BYTES
        if len(self._input) >= HELLO_BYTES:
            wanted += self._input[NONCE_BYTES] + PROOF_BYTES
        try:
            data = self.connection.recv(wanted - len(self._input))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        self._input += data
        self.open = self.open and bool(data)
        if not self.open or len(self._input) < wanted:
            return None
        return self._prove() if wanted > HELLO_BYTES else self.hear()

    def _prove(self) -> str | None:
        nonces = self._nonce + self._input[:NONCE_BYTES]
        claim, given = self._input[HELLO_BYTES:-PROOF_BYTES], self._input[-PROOF_BYTES:]
        self.open = handshake.proves(given, self._secret, handshake.CONNECTS, nonces, claim)
        if self.open:
            self._send(handshake.proof(self._secret, handshake.LISTENS, nonces, claim))
        return os.fsdecode(claim) if self.open else None


def answer(connection: socket.socket, secret: str) -> str | None:
    """Return the name of who calls on `connection`, once it is proven; None where it is not."""
    stranger = _Stranger(connection, secret.encode())
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    while stranger.open and (left := stranger.deadline - time.monotonic()) > 0:
        if poller.poll(left * 1000) and (name := stranger.hear()) is not None:
            connection.setblocking(True)
            return name
    return None


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


def _listen(address: str) -> socket.socket:
    return listen(Address(address, 0))


def call_from_environment(
    addresses: Sequence[str], environ: MutableMapping[str, str]
) -> socket.socket:
    """Return the connection of an agent, as its environment says; takes the secret out of that."""
    secret = environ.pop(SECRET_VARIABLE, "")
    name = environ.get(environ.pop(NAMED_BY_VARIABLE, ""), "")
    return call_back(addresses, secret, name)


def call_back(
    addresses: Sequence[str], secret: str, name: str, seconds: float = CALL_SECONDS
) -> socket.socket:
    """Return the agent's connection with the launcher, which both ends have proven.

    Each address such as ``10.0.0.1:4321`` is tried in turn, again and again for `seconds`. Raises
    `OSError` that tells of each address why not.
    """
    deadline = time.monotonic() + seconds
    while True:
        why = []
        for text in addresses:
            try:
                return call(parse(text, "the launcher's address"), secret, name)
            except OSError as error:
                why.append(f"{text}: {error}")
        if time.monotonic() >= deadline:
            raise OSError(f"cannot connect with the launcher ({'; '.join(why)})")
        time.sleep(0.2)


def call(address: Address, secret: str, name: str, seconds: float = TRY_SECONDS) -> socket.socket:
    """Return a connection with who listens at `address`, which both ends have proven.

    Raises `OSError` where nobody answers within `seconds`, or another one does.
    """
    connection = connect(address, seconds)
    try:
        own, claim, key = handshake.new_nonce(), os.fsencode(name), secret.encode()
        nonces = _read(connection, NONCE_BYTES) + own
        own_proof = handshake.proof(key, handshake.CONNECTS, nonces, claim)
        connection.sendall(b"".join((own, bytes([len(claim)]), claim, own_proof)))
        given = _read(connection, PROOF_BYTES)
        if not handshake.proves(given, key, handshake.LISTENS, nonces, claim):
            raise ConnectionRefusedError("who answers is not the launcher of this job")
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return connection


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionAbortedError("the other end closed the connection")
        data += part
    return data
