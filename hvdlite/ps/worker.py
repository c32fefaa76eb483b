"""A worker of a cluster: its tables, which lie on the servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.plain.handles import Handle
from hvdlite.ps.blocks import Array, Block, TensorSpec, blocks_of
from hvdlite.ps.client import Client, Connection
from hvdlite.ps.clocks import Mode
from hvdlite.ps.enrolment import Enrolment
from hvdlite.ps.layout import Layout, Part
from hvdlite.ps.messages import Message
from hvdlite.ps.registry import TableOptions
from hvdlite.ps.server import describe_table
from hvdlite.ps.settings import ClusterSettings
from hvdlite.ps.shard import Shard

START_SECONDS = 1800.0


class Worker:
    """A worker. Raises ConfigError where the cluster does not let it in."""

    def __init__(
        self, settings: ClusterSettings, *, number: int | None = None,
        start_seconds: float = START_SECONDS,
    ) -> None:  # fmt: skip
        self._client = Client(_identity(settings, number))
        self._servers: dict[int, _ServerLink] = {}
        self.failure = ""
        self._enrolment = Enrolment(self._client, settings, number=number, changed=self._change)
        try:
            self._enrolment.enter(start_seconds)
        except BaseException:
            self._client.close()
            raise
        self.size = settings.num_workers
        self._tables: dict[str, RemoteTable] = {}

    @property
    def number(self) -> int:
        """The number of this worker."""
        assert self._enrolment.number is not None
        return self._enrolment.number

    def _change(self, body: Mapping[str, Any]) -> None:
        """Follow the servers to their addresses, in the client."""
        for number, address, _incarnation in body["servers"]:
            link = self._servers.setdefault(number, _ServerLink(self._client))
            link.follow(address)
        if body["failure"] and not self.failure:
            self.failure = body["failure"]
            for link in self._servers.values():
                link.fail(HorovodInternalError(self.failure))

    def declare(
        self, name: str, specs: Sequence[TensorSpec], options: TableOptions,
        values: Callable[[], Sequence[Array]],
    ) -> RemoteTable:  # fmt: skip
        """Return a table that all workers declare alike. `values` gives flat tensors to begin with.

        Raises `HorovodInternalError` where workers disagree.
        """
        body = {
            "specs": [[spec.name, spec.dtype, list(spec.shape), spec.group] for spec in specs],
            "options": list(options),
        }
        answer = self._ask(Message("declare", 0, name, body=body))
        if answer.kind == "failed":
            raise HorovodInternalError(answer.body["why"], job_goes_on=True)
        parts = tuple(Part(*part) for part in answer.body["parts"])
        first_key = answer.body["first_key"]
        layout = Layout(parts, (), len(self._servers))
        blocks = [blocks_of(specs, first_key, layout, server) for server in self._servers]
        table = RemoteTable(
            name, specs, first_key, blocks, options, values, self._client,
            [*self._servers.values()], self.number,
        )  # fmt: skip
        self._tables[name] = table
        return table

    def barrier(self) -> None:
        """Wait until all workers have come here."""
        self._ask(Message("barrier"))

    def _ask(self, message: Message) -> Message:
        while True:
            handle = self._client.ask(lambda done: self._enrolment.request(message, done))
            answer: Message = handle.wait()
            if answer.kind != "restarted":  # Else the scheduler has to hear of this worker first.
                return answer

    def leave(self) -> None:
        """Let the others go on without this worker, and end its connections."""
        for server in self._servers.values():
            self._client.ask(server.leave).ended_within(5.0)
        self._enrolment.leave()
        self._client.close()

    def close(self) -> None:
        """End the connections without a word."""
        self._client.close()


class _ServerLink:
    """The connection with one server, wherever it is, and the shards of tables there."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._address = ""
        self._connection: Connection | None = None
        self._shards: list[Shard] = []
        self._left: Callable[[Message], None] | None = None

    def follow(self, address: str) -> None:
        """Connect with another address, where the server has moved."""
        if address == self._address:
            return
        if self._connection is not None:
            self._client.disconnect(self._connection)
        self._address = address
        self._connection = self._client.connect(address)
        self._connection.receive = self._receive
        for shard in self._shards:
            shard.come_again()

    def send(self, message: Message) -> int:
        """Send a request; return its id."""
        assert self._connection is not None
        return self._connection.send(message)

    def add(self, shard: Shard) -> None:
        """Let a shard hear of answers."""
        self._shards.append(shard)

    def leave(self, done: Callable[[Message], None]) -> None:
        """Tell the server that this worker goes."""
        self._left = done
        self.send(Message("leave"))

    def fail(self, error: Exception) -> None:
        """Fail all that waits for the server."""
        for shard in self._shards:
            shard.fail(error)

    def _receive(self, message: Message) -> None:
        if message.kind == "done" and self._left is not None:
            self._left(message)
        for shard in self._shards:
            if shard.table == message.table:
                shard.receive(message)


class RemoteTable:
    """A table on the servers, as one worker pushes to it and pulls from it."""

    def __init__(
        self, name: str, specs: Sequence[TensorSpec], first_key: int,
        blocks: Sequence[Sequence[Block]], options: TableOptions,
        values: Callable[[], Sequence[Array]], client: Client, links: Sequence[_ServerLink],
        worker: int,
    ) -> None:  # fmt: skip
        self.name = name
        self._client, self._first_key = client, first_key
        self._blocks = blocks
        self._shards: list[Shard] = []
        self._staging: list[list[Array]] = []
        mode = Mode(options.mode, options.staleness)
        for server, link in enumerate(links):
            described = describe_table(specs, blocks[server], mode, average=options.average)
            shard = Shard(
                name, server, worker, described,
                partial(self._cut_values, values, server), link.send,
            )  # fmt: skip
            link.add(shard)
            self._shards.append(shard)
        for handle in [self._client.ask(shard.start) for shard in self._shards]:
            handle.wait()

    @property
    def clock(self) -> int:
        """The number of steps that this worker has finished."""
        return min(shard.clock for shard in self._shards)

    @property
    def version(self) -> int:
        """The lowest version of the values that were pulled."""
        return min(shard.version for shard in self._shards)

    def push(self, tensors: Sequence[Array], body: Mapping[str, Any]) -> list[Handle]:
        """Push the gradients of a step, as flat tensors, which are copied."""
        handles = []
        for server, shard in enumerate(self._shards):
            payloads = self._cut(tensors, server) if tensors else []
            ask = _push(shard, body, payloads)
            handles.append(self._client.ask(ask))
        return handles

    def pull(self, tensors: Sequence[Array]) -> None:
        """Pull the values that the next step needs into flat tensors.

        Raises `PsRolledBack`, and `HorovodInternalError` where a server is lost for good.
        """
        handles = [self._client.ask(shard.pull) for shard in self._shards]
        for blocks, handle in zip(self._blocks, handles, strict=True):
            answer = handle.wait()
            for block, data in zip(blocks, answer.payloads, strict=True):
                block.scatter(block.view(data), tensors, self._first_key)

    def _cut_values(self, values: Callable[[], Sequence[Array]], server: int) -> list[memoryview]:
        return self._cut(values(), server)

    def _cut(self, tensors: Sequence[Array], server: int) -> list[memoryview]:
        payloads = []
        for block in self._blocks[server]:
            array = block.new()
            block.gather(tensors, self._first_key, array)
            payloads.append(memoryview(array.view("u1").data))
        return payloads


def _push(
    shard: Shard, body: Mapping[str, Any], payloads: Sequence[memoryview]
) -> Callable[[Callable[[Message | Exception], None]], None]:
    return lambda done: shard.push(body, payloads, done)


def _identity(settings: ClusterSettings, number: int | None) -> bytes:
    name = settings.node_id or str(number)
    return f"{settings.role} {name} {os.getpid()} {os.urandom(4).hex()}".encode()
