"""The store by which the members of a process group of c10d find each other.

Its first member serves it, in threads, until the group is closed. torch's own TCPStore takes five
seconds where several clients connect at a time.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgpack
from torch._C._distributed_c10d import Store

from hvdlite.common.base.networks import list_interfaces
from hvdlite.common.meeting.placement import host_identity
from hvdlite.common.transport.tcp.addresses import Endpoint, choose, order

LOOPBACK = "127.0.0.1"
PROBE_SECONDS = 3.0  # For one address; one behind a firewall never answers.
MOST_BYTES = 1 << 24  # Of one message; guards against foreign data.
_HEADER = struct.Struct("!I")


class StoreServer:
    """Keys and values of one process group, for those that know the token."""

    def __init__(self, wanted: tuple[str, ...]) -> None:
        """Listen on the `wanted` interfaces, or on all but inner ones; and on the loopback."""
        self._token = secrets.token_bytes(16)
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()  # Guards `_values` and `_closed`.
        self._closed = False
        self._socket = socket.create_server(("", 0), family=socket.AF_INET, backlog=128)
        port = self._socket.getsockname()[1]
        try:
            chosen = choose(list_interfaces(), wanted, one_machine=False)
        except RuntimeError:  # A machine without a network.
            chosen = []
        endpoints = [(each.address, each.prefix, port) for each in chosen]
        self.offer: bytes = msgpack.packb((host_identity(), endpoints, port, self._token))
        threading.Thread(target=self._accept, name="hvdlite-store", daemon=True).start()

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                serve = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                serve.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, EOFError, ValueError):
            connection.settimeout(PROBE_SECONDS)
            if not secrets.compare_digest(_receive(connection), self._token):
                return
            connection.settimeout(None)
            _send(connection, b"hvdlite")
            while True:
                method, *arguments = msgpack.unpackb(_receive(connection))
                _send(connection, msgpack.packb(self._METHODS[method](self, *arguments)))

    def _set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def _add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
        return total

    def _compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        with self._changed:
            if self._values.get(key, b"") == expected:
                self._values[key] = value
                self._changed.notify_all()
            return self._values.get(key, expected)

    def _wait(self, keys: list[str], seconds: float) -> bool:
        def here() -> bool:
            return self._closed or all(key in self._values for key in keys)

        with self._changed:
            found = self._changed.wait_for(here, seconds)
            if self._closed:  # Nobody will set them: whoever waits hears of it at once.
                raise EOFError
            return found

    def _get(self, key: str) -> bytes:
        with self._changed:
            return self._values.get(key, b"")

    def _check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def _delete(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None

    def _count(self) -> int:
        with self._changed:
            return len(self._values)

    _METHODS: dict[str, Callable[..., Any]] = {  # noqa: RUF012
        "set": _set,
        "add": _add,
        "compare_set": _compare_set,
        "wait": _wait,
        "get": _get,
        "check": _check,
        "delete": _delete,
        "count": _count,
    }


class StoreClient(Store):
    """The store as torch calls it, also from C++."""

    def __init__(self, offer: bytes, limit_seconds: float) -> None:
        """Connect. Raises `RuntimeError` with what was tried."""
        super().__init__()
        self._offer = offer
        self._limit_seconds = limit_seconds
        self._lock = threading.Lock()  # Guards the connection.
        self._connection = _connect(offer)

    def close(self) -> None:
        """Close the connection: nobody asks any more."""
        self._connection.close()

    def __del__(self) -> None:
        with suppress(AttributeError):  # It was never connected.
            self.close()

    def clone(self) -> StoreClient:
        """Return another connection to the same store."""
        return StoreClient(self._offer, self._limit_seconds)

    def set(self, key: str, value: Any) -> None:
        """Set a value."""
        self._ask("set", key, _as_bytes(value))

    def get(self, key: str) -> bytes:
        """Return a value when it is there."""
        self.wait([key])
        return bytes(self._ask("get", key))

    def add(self, key: str, amount: int) -> int:
        """Add to a number; return it."""
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: Any, value: Any) -> bytes:
        """Replace a value if it is as expected; return the value."""
        return bytes(self._ask("compare_set", key, _as_bytes(expected), _as_bytes(value)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Sleep until all keys are there. Raises `RuntimeError` after the time limit."""
        seconds = self._limit_seconds if timeout is None else timeout.total_seconds()
        # The connection is for everyone meanwhile: C++ sets keys while it waits for others.
        until = time.monotonic() + min(seconds, self._limit_seconds)
        while not self._ask("wait", keys, 0.1):
            if time.monotonic() > until:
                raise RuntimeError(f"no other rank has set {keys} after {self._limit_seconds} s")

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return bool(self._ask("check", keys))

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return int(self._ask("count"))

    def _ask(self, *question: Any) -> Any:
        with self._lock:
            _send(self._connection, msgpack.packb(question))
            return msgpack.unpackb(_receive(self._connection))


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _connect(offer: bytes) -> socket.socket:
    """Return a connection to the server, at the nearest of its addresses."""
    host, endpoints, port, token = msgpack.unpackb(offer)
    targets = order(list_interfaces(), [Endpoint(*each) for each in endpoints])
    hosts = [LOOPBACK] * (host == host_identity()) + [str(each.address[0]) for each in targets]
    tried = []
    for address in hosts:
        connection = None
        try:
            connection = socket.create_connection((address, port), PROBE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _send(connection, token)
            if _receive(connection) == b"hvdlite":
                connection.settimeout(None)
                return connection
            tried.append(f"{address}: another program answers")
        except (OSError, EOFError, ValueError) as error:
            tried.append(f"{address}: {error}")
        if connection is not None:
            connection.close()
    raise RuntimeError(
        f"the store of the first rank is not reached, port {port} at "
        f"{'; '.join(tried) or 'no address'}. Open the port range for ranks, or name the network "
        "of the job by HVDLITE_NETWORK_INTERFACES"
    )


def _send(connection: socket.socket, body: bytes) -> None:
    connection.sendall(_HEADER.pack(len(body)) + body)


def _receive(connection: socket.socket) -> bytes:
    (size,) = _HEADER.unpack(_exactly(connection, _HEADER.size))
    if size > MOST_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError("the connection was closed")
        parts += part
    return bytes(parts)
