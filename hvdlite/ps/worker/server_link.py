"""The connection of a worker with one server, wherever it is, and the shards of tables there."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hvdlite.common.base.errors import (
    ConfigError,
    HorovodInternalError,
    HorovodVersionMismatchError,
)
from hvdlite.ps.connections.client import Client
from hvdlite.ps.connections.connection import Connection
from hvdlite.ps.connections.messages import SERVER, Message
from hvdlite.ps.worker.ordered_operations import Done
from hvdlite.ps.worker.shard import Shard


class ServerLink:
    """A connection that follows its server. Its methods are called in the client's thread."""

    def __init__(self, client: Client, server: int, worker: Callable[[], int]) -> None:
        self.server = server
        self._client, self._worker = client, worker
        self._address = ""
        self._connection: Connection | None = None
        self._lock = threading.Lock()  # Guards the shards, to which two threads add.
        self._shards_of: dict[str, list[Shard]] = {}  # By their table; lists are replaced.
        self._error: Exception | None = None  # Why the server is lost for good.
        self._left: Callable[[Message], None] | None = None
        self._welcomed: int | None = None  # The incarnation that has welcomed it at the address.
        self._asked = False  # Whether the server lives.
        self._requests: dict[int, tuple[Message, Done]] = {}  # Of `ask`, by their ids.

    def follow(self, address: str) -> None:
        """Connect with another address, where the server has moved."""
        if address == self._address:
            return
        self.close()
        self._address, self._error, self._welcomed = address, None, None
        self._connection = self._client.connect(address, SERVER, self._refuse)
        self._connection.receive = self._receive
        self._connection.caller.connected = self._say_hello
        self._come_again()

    def _say_hello(self) -> None:
        """Say who this is, though it may have no table: a server waits to hear that."""
        tables = [each.table for each in self._shards if each.is_used]
        self.send(Message("hello", body={"worker": self._worker(), "tables": tables}))

    def _refuse(self, error: Exception) -> None:
        """Fail, unless it is another process that answers where the server has been."""
        if self._welcomed is None:
            is_other = isinstance(error, HorovodVersionMismatchError)
            self.fail(error if is_other else ConfigError(f"server {self.server} says: {error}"))

    def close(self) -> None:
        """End the connection with a server that is no more."""
        if self._connection is not None:
            self._client.disconnect(self._connection)
            self._connection = None

    @property
    def shares_memory(self) -> bool:
        """Whether the server reads payloads in this process; may be asked in any thread."""
        connection = self._connection
        return connection is not None and connection.caller.sharing is not None

    def send(self, message: Message) -> int:
        """Send a request; return its id."""
        assert self._connection is not None
        return self._connection.send(message)

    @property
    def _shards(self) -> list[Shard]:
        """The shards that no later one has replaced."""
        lists = list(self._shards_of.values())
        return [shard for shards in lists for shard in shards if not shard.retired]

    def add(self, shard: Shard) -> None:
        """Let a shard hear of answers."""
        shard.records = self._client.records
        with self._lock:
            others = self._shards_of.get(shard.table, ())
            self._shards_of[shard.table] = [*(each for each in others if not each.retired), shard]
            if self._error is not None:
                shard.fail(self._error)

    @property
    def is_used(self) -> bool:
        """Whether the server keeps something of this worker's tables."""
        return bool(self._shards)

    def ask(self, message: Message, done: Done) -> None:
        """Send a request until it is answered, also to a server that comes again."""
        if self._error is not None:
            done(self._error)
            return
        self._requests[self.send(message)] = message, done

    def leave(self, done: Callable[[Message], None]) -> None:
        """Tell the server that this worker goes."""
        self._left = done
        self.send(Message("leave"))

    def fail(self, error: Exception) -> None:
        with self._lock:
            self._error = error
            shards = self._shards
        for shard in shards:
            shard.fail(error)
        self.fail_requests(error)

    def fail_requests(self, error: Exception) -> None:
        """End what was asked of the server itself, which will not answer as things are now."""
        requests, self._requests = self._requests, {}
        for _, done in requests.values():
            done(error)

    def watch(self, now: float, most_seconds: float) -> None:
        """Fail what waits for a server that has not said a word for `most_seconds`."""
        connection = self._connection
        waits = bool(self._requests) or any(shard.waits for shard in self._shards)
        if connection is None or not waits:
            self._asked = False
            return
        if not self._asked:
            self._asked = True
            connection.heard = now
            self.send(Message("beat"))
        elif now - connection.heard >= most_seconds:
            address, caller = self._address.partition(" ")[0], connection.caller
            trouble = "" if caller.is_connected else f", and it is not reached: {caller.trouble}"
            self.fail(
                HorovodInternalError(
                    f"server {self.server} ({address}) is lost: nothing was heard of it for "
                    f"{most_seconds:g} seconds (--ps-timeout){trouble}"
                )
            )

    def _receive(self, message: Message) -> None:
        assert self._connection is not None
        if message.kind == "welcome":
            same = message.body["is_known"] and message.incarnation == self._welcomed
            self._welcomed = message.incarnation
            if same:
                self._connection.send_again()
            else:
                self._come_again()
        elif message.kind == "beat":
            self._asked = False
        elif message.request in self._requests:
            self._requests.pop(message.request)[1](message)
        elif message.kind == "failed" and not message.table:  # It does not let this worker in.
            self.fail(HorovodInternalError(f"server {self.server} says: {message.body['why']}"))
        elif message.kind == "done" and self._left is not None:
            self._left(message)
        else:
            for shard in self._shards_of.get(message.table, ()):
                shard.receive(message)

    def _come_again(self) -> None:
        """Start all shards anew at a server that does not know this worker."""
        assert self._connection is not None
        self._connection.forget()
        self._asked = False
        for shard in self._shards:
            shard.come_again()
        requests, self._requests = self._requests, {}
        for request in requests.values():
            self.ask(*request)
        if self._left is not None:
            self.leave(self._left)
