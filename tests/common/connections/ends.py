"""Two ends of connections in one loop, and what a stranger would send."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from hvdlite.common.connections import prove
from hvdlite.common.connections.address import Target
from hvdlite.common.connections.dial import Dial, Failure, Limits
from hvdlite.common.connections.listener import Listener
from hvdlite.common.connections.loop import Loop
from hvdlite.common.connections.prove import Challenge, Claim, Party

SECRET = b"the secret of the job"
SERVER, WORKER = Party(SECRET, "server", "worker"), Party(SECRET, "worker", "server")
LIMITS = Limits(5, 5)
SECONDS = 20.0  # What a wait of a test may take.


class VirtualLoop(Loop):
    """A loop whose clock moves by `pass_time` alone."""

    def __init__(self) -> None:
        self.time = 1000.0
        super().__init__()

    def now(self) -> float:
        """Return the virtual time."""
        return self.time

    def pass_time(self, seconds: float) -> None:
        """Move the clock, and handle what is due."""
        self.time += seconds
        while self.run_once(0):
            pass


def run_until(loop: Loop, condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Run `loop` until `condition` holds."""
    over: list[None] = []
    timer = Loop.call_after(loop, seconds, lambda: over.append(None))
    while not condition():
        assert not over, "it takes too long"
        loop.run_once(None if type(loop) is Loop else 0.05)
    timer.cancel()


def tcp(family: int = socket.AF_INET) -> socket.socket:
    """Return a socket that listens on loopback."""
    host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    return socket.create_server((host, 0), family=socket.AddressFamily(family))


def target(listening: socket.socket) -> Target:
    """Return what to dial for a socket that listens."""
    return Target(listening.family, listening.getsockname())


class Host:
    """A listener with all that it has heard."""

    def __init__(self, loop: Loop, *listening: socket.socket, **options: Any) -> None:
        self.sockets = list(listening) or [tcp()]
        self.accepted: list[tuple[prove.Claim, socket.socket]] = []
        self.refused: list[tuple[int, str]] = []
        self.loop = loop
        party = options.pop("party", SERVER)
        self.listener = Listener(
            loop,
            self.sockets,
            party,
            lambda *each: self.accepted.append(each),
            refused=lambda code, sentence, claim: self.refused.append((code, sentence)),
            **options,
        )

    @property
    def target(self) -> Target:
        """Return what to dial."""
        return target(self.sockets[0])

    def close(self) -> None:
        """Close everything."""
        self.listener.close()
        for _, connection in self.accepted:
            connection.close()


class Caller:
    """A dial, and its end."""

    def __init__(
        self, loop: Loop, *targets: Target, party: Party = WORKER, body: bytes = b"7",
        limits: Limits = LIMITS,
    ) -> None:  # fmt: skip
        self.connection: socket.socket | None = None
        self.reached: Target | None = None
        self.failures: list[Failure] | None = None
        self.dial = Dial(loop, targets, party, body, self._connected, self._failed, limits)

    def _connected(self, connection: socket.socket, reached: Target) -> None:
        assert self.connection is None
        self.connection, self.reached = connection, reached

    def _failed(self, failures: list[Failure]) -> None:
        self.failures = failures

    @property
    def over(self) -> bool:
        """Whether the dial has ended."""
        return self.connection is not None or self.failures is not None


@contextmanager
def strangers(target: Target, count: int) -> Iterator[list[socket.socket]]:
    """Connect `count` times and say nothing."""
    sockets = []
    for _ in range(count):
        each = socket.socket(target.family)
        each.settimeout(SECONDS)
        each.connect(target.address)
        sockets.append(each)
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close()


def is_closed(loop: Loop, connection: socket.socket) -> bool:
    """Return whether the other end has closed `connection`, after what it has sent."""
    for _ in range(100):
        loop.run_once(0)
    connection.setblocking(False)
    with suppress(BlockingIOError):
        try:
            while connection.recv(4096):
                pass
        except ConnectionError:
            pass
        return True
    return False


def strangers_are_closed(address: tuple[str, int], party: Party) -> None:
    """Let strangers come, all at a time; `party` is that of a member, with a secret of nobody."""
    threads = set(threading.enumerate())
    words = [b"", prove.MAGIC[:5], b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 8, None]
    with ExitStack() as stack:
        held = []
        for each in words:
            stranger = stack.enter_context(socket.create_connection(address, SECONDS))
            challenge = Challenge.unpack(stranger.recv(prove.CHALLENGE.size, socket.MSG_WAITALL))
            claim = prove.prove_claim(party.secret, challenge, Claim.new(party, b""))
            stranger.sendall(claim if each is None else each)
            held.append(stranger)
        assert set(threading.enumerate()) <= threads
        for stranger in held:
            with suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
