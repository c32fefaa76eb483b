"""The store by which the members of a process group of c10d find each other.

Its first member serves it until the group is closed. torch's own TCPStore takes five seconds where
several clients connect at a time.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgpack
from torch._C._distributed_c10d import Store

from hvdlite.common.base.networks import list_interfaces
from hvdlite.common.connections.address import Address
from hvdlite.common.connections.prove import Party
from hvdlite.common.connections.service import Client, Service, Wait
from hvdlite.common.transport.tcp.addresses import Endpoint, order
from hvdlite.common.transport.tcp.connect import listen_near_and_far

STORE, MEMBER = "c10d store", "c10d member"  # The ends of a connection.
MOST_BYTES = 1 << 24  # Of one message.
_AS_NUMBERS = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV


class StoreServer(Service):
    """Keys and values of one process group, for those that know the token of its `offer`."""

    def __init__(self, wanted: tuple[str, ...]) -> None:
        """Listen on the `wanted` interfaces, or on all but inner ones; and on the loopback."""
        token = secrets.token_bytes(16)
        self._values: dict[str, bytes] = {}
        listening = listen_near_and_far(wanted)
        self.offer: bytes = msgpack.packb(([endpoint for endpoint, _ in listening], token))
        methods: dict[str, Callable[..., Any]] = {
            "set": self._set,
            "add": self._add,
            "compare_set": self._compare_set,
            "wait": self._wait,
            "get": lambda key: self._values.get(key, b""),
            "check": self._check,
            "delete": lambda key: self._values.pop(key, None) is not None,
            "count": lambda: len(self._values),
        }
        sockets = [each for _, each in listening]
        super().__init__("hvdlite-store", sockets, Party(token, STORE, MEMBER), methods, MOST_BYTES)

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self.look()

    def _add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._set(key, str(total).encode())
        return total

    def _compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        if self._values.get(key, b"") == expected:
            self._set(key, value)
        return self._values.get(key, expected)

    def _wait(self, keys: list[str], seconds: float) -> Wait:
        return Wait(lambda: self._check(keys), bool, seconds)

    def _check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


class StoreClient(Store):
    """The store as torch calls it, also from C++."""

    def __init__(self, offer: bytes, limit_seconds: float) -> None:
        """Connect. Raises `RuntimeError` with what was tried."""
        super().__init__()
        self._offer = offer
        self._limit_seconds = limit_seconds
        endpoints, token = msgpack.unpackb(offer)
        targets = order(list_interfaces(), [Endpoint(*each) for each in endpoints])
        named = [socket.getnameinfo(each.address, _AS_NUMBERS) for each in targets]
        addresses = [Address(host, int(port)) for host, port in named]
        try:
            self._client = Client(addresses, Party(token, MEMBER, STORE), MOST_BYTES)
        except ConnectionError as error:
            raise RuntimeError(
                f"the store of the first rank is not reached: {error}. Open the ports between the "
                "hosts, or name the network of the job by HVDLITE_NETWORK_INTERFACES"
            ) from error

    def close(self) -> None:
        """Close the connection: nobody asks any more."""
        self._client.close()

    def __del__(self) -> None:
        with suppress(AttributeError):  # It was never connected.
            self.close()

    def clone(self) -> StoreClient:
        """Return another connection to the same store."""
        return StoreClient(self._offer, self._limit_seconds)

    def set(self, key: str, value: Any) -> None:
        """Set a value."""
        self._client.ask("set", key, _as_bytes(value))

    def get(self, key: str) -> bytes:
        """Return a value when it is there."""
        self.wait([key])
        return bytes(self._client.ask("get", key))

    def add(self, key: str, amount: int) -> int:
        """Add to a number; return it."""
        return int(self._client.ask("add", key, amount))

    def compare_set(self, key: str, expected: Any, value: Any) -> bytes:
        """Replace a value if it is as expected; return the value."""
        return bytes(self._client.ask("compare_set", key, _as_bytes(expected), _as_bytes(value)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Sleep until all keys are there. Raises `RuntimeError` after the time limit."""
        seconds = self._limit_seconds
        if timeout is not None:
            seconds = min(seconds, timeout.total_seconds())
        if not self._client.ask("wait", keys, seconds):
            raise RuntimeError(f"no other rank has set {keys} after {seconds:g} s")

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return bool(self._client.ask("check", keys))

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        return bool(self._client.ask("delete", key))

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return int(self._client.ask("count"))


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
