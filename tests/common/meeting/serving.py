"""Servers of meetings, and ranks that meet there: both ends, for tests."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hvdlite.common.connections.address import Address, listen, parse_address
from hvdlite.common.connections.loop import Loop
from hvdlite.common.meeting.client import Participant, ServerExchange
from hvdlite.common.meeting.meet import HostedExchange
from hvdlite.common.meeting.server import MeetingServer

SECRET = b"only this job knows it"


LIMIT = 20.0  # Seconds; a test that is well takes a fraction of one.


def soon(seconds: float = LIMIT) -> float:
    return time.monotonic() + seconds


def port_of(listener: socket.socket) -> Address:
    host, port, *_ = listener.getsockname()
    return Address(host, port)


MOST_TURNS = 100  # Between two moments in which the lock is free.


class Driver:
    """A server in a thread of its own, as the launcher and its agents run one."""

    def __init__(self, make: Callable[[Loop], MeetingServer]) -> None:
        self.lock = threading.Lock()
        self._loop = Loop()
        self.server = make(self._loop)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.001):
            with self.lock:
                # On a busy machine a turn for each of many connections would take seconds.
                for _ in range(MOST_TURNS):
                    if not self._loop.run_once(0.0):
                        break

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.server.close()
        self._loop.close()


@contextlib.contextmanager
def serving(size: int, secret: bytes = SECRET, **options: Any) -> Iterator[tuple[Address, Driver]]:
    listener = listen(Address("127.0.0.1", 0))
    address = port_of(listener)
    ranks = options.pop("ranks", range(size))
    driver = Driver(lambda loop: MeetingServer(loop, listener, ranks, size, secret, **options))
    try:
        yield address, driver
    finally:
        driver.close()


def meet(exchange: Any, rounds: int = 3) -> list[list[bytes]]:
    try:
        return [exchange.allgather(f"{r} of {exchange.rank}".encode()) for r in range(rounds)]
    finally:
        exchange.close()


def expected(size: int, rounds: int = 3) -> list[list[bytes]]:
    return [[f"{r} of {rank}".encode() for rank in range(size)] for r in range(rounds)]


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
