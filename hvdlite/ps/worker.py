"""A worker of a cluster: its tables, which lie on the servers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.plain.handles import Handle
from hvdlite.common.runtime.state import find as find_runtime
from hvdlite.ps.blocks import Array, Block, TensorSpec, blocks_of, dtype_of
from hvdlite.ps.client import Client
from hvdlite.ps.clocks import Mode
from hvdlite.ps.enrolment import Enrolment
from hvdlite.ps.layout import Layout, Part
from hvdlite.ps.link import ServerLink
from hvdlite.ps.messages import Message
from hvdlite.ps.records import Records
from hvdlite.ps.registry import TableOptions
from hvdlite.ps.remote_rows import RemoteRows
from hvdlite.ps.server import describe_table
from hvdlite.ps.settings import ANSWER_SECONDS, WORKER, ClusterSettings
from hvdlite.ps.shard import PsRolledBack, Shard
from hvdlite.ps.table_shards import TableShards

WATCH_SECONDS = 1.0


class Worker:
    """A worker. Raises ConfigError where the cluster does not let it in."""

    def __init__(
        self, settings: ClusterSettings, *, number: int | None = None,
    ) -> None:  # fmt: skip
        self._client = Client(_identity(settings, number), settings.curve_token)
        self._token = settings.token
        self._servers: dict[int, ServerLink] = {}
        self._silence_seconds = settings.server_seconds
        self.failure = ""
        self._enrolment = Enrolment(self._client, settings, number=number, changed=self._change)
        try:
            self._enrolment.enter(settings.start_seconds + ANSWER_SECONDS)
        except BaseException:
            self._client.close()
            raise
        self._client.every(WATCH_SECONDS, self._watch)
        rank = None if settings.independent else find_runtime()
        self._client.records = Records.by_settings(
            os.environ, WORKER, self.number, None if rank is None else rank.timeline
        )
        self.size = settings.num_workers
        self.named: dict[str, RemoteTable | RemoteRows] = {}  # The tables of this worker.

    @property
    def number(self) -> int:
        """The number of this worker."""
        assert self._enrolment.number is not None
        return self._enrolment.number

    def _change(self, body: Mapping[str, Any]) -> None:
        """Follow the servers to their addresses, in the client."""
        for number, address, _incarnation in body["servers"]:
            if number not in self._servers:
                link = ServerLink(self._client, number, lambda: self.number, self._token)
                self._servers[number] = link
            self._servers[number].follow(address)
        if body["failure"]:
            self.failure = body["failure"]
            for link in self._servers.values():
                link.fail(HorovodInternalError(self.failure))
            self._enrolment.fail_requests(self.failure)

    def _watch(self) -> None:
        now = time.monotonic()
        for link in self._servers.values():
            link.watch(now, self._silence_seconds)

    def declare(
        self, name: str, specs: Sequence[TensorSpec], options: TableOptions,
        values: Callable[[], Sequence[Array]], form: type[RemoteTable] | None = None,
    ) -> RemoteTable:  # fmt: skip
        """Return a table that all workers declare alike. `values` gives flat tensors to begin with.

        Raises `HorovodInternalError` where workers disagree.
        """
        answer = self._declare(name, specs, options)
        parts = tuple(Part(*part) for part in answer.body["parts"])
        first_key = answer.body["first_key"]
        layout = Layout(parts, (), len(self._servers))
        blocks = [blocks_of(specs, first_key, layout, server) for server in self._servers]
        table = (form or RemoteTable)(
            name, specs, first_key, blocks, options, values, self._client,
            [*self._servers.values()], self.number,
        )  # fmt: skip
        self.named[name] = table
        return table

    def declare_rows(self, spec: TensorSpec, options: TableOptions) -> RemoteRows:
        """Return a table of rows that all workers declare alike; its name is that of `spec`.

        Raises `HorovodInternalError` where workers disagree.
        """
        self._declare(spec.name, [spec], options)

        def new_shard(server: int, about: Mapping[str, Any]) -> Shard:
            link = self._servers[server]
            shard = Shard(spec.name, server, self.number, about, list, link.send, "_rows")
            link.add(shard)
            return shard

        table = RemoteRows(spec, options, self._client, len(self._servers), new_shard)
        self.named[spec.name] = table
        return table

    def find(self, name: str) -> tuple[list[TensorSpec], TableOptions] | None:
        """Return what other workers have declared a table to be; None where nobody has."""
        body = self._ask(Message("declare", 0, name)).body
        if not body["specs"]:
            return None
        specs = [TensorSpec(n, d, tuple(shape), group) for n, d, shape, group in body["specs"]]
        return specs, TableOptions(*body["options"])

    def _declare(self, name: str, specs: Sequence[TensorSpec], options: TableOptions) -> Message:
        body = {
            "specs": [[spec.name, spec.dtype, list(spec.shape), spec.group] for spec in specs],
            "options": list(options),
        }
        answer = self._ask(Message("declare", 0, name, body=body))
        if answer.kind == "failed":
            raise HorovodInternalError(answer.body["why"], job_goes_on=True)
        return answer

    def barrier(self) -> None:
        """Wait until all workers have come here."""
        self._ask(Message("barrier"))

    def _ask(self, message: Message) -> Message:
        while True:
            handle = self._client.ask(lambda done: self._enrolment.request(message, done))
            answer: Message = handle.wait()
            if answer.kind == "failed":
                raise HorovodInternalError(answer.body["why"], job_goes_on=not self.failure)
            if answer.kind != "restarted":  # Else the scheduler has to hear of this worker first.
                return answer

    def leave(self) -> None:
        """Let the others go on without this worker, and end its connections."""
        for server in self._servers.values():
            self._client.ask(server.leave).ended_within(5.0)
        self._enrolment.leave()
        self.close()

    def close(self) -> None:
        """End the connections without a word."""
        self._client.close()
        self._client.records.close()


class RemoteTable(TableShards):
    """A table on the servers, as one worker pushes to it and pulls from it."""

    first_version = -1  # -2: another worker has the values to begin with.

    def __init__(
        self, name: str, specs: Sequence[TensorSpec], first_key: int,
        blocks: Sequence[Sequence[Block]], options: TableOptions,
        values: Callable[[], Sequence[Array]], client: Client, links: Sequence[ServerLink],
        worker: int,
    ) -> None:  # fmt: skip
        self.name = name
        self.specs, self._first_key = list(specs), first_key
        self._blocks = blocks
        shards: list[Shard] = []
        self._staging: list[list[Array]] = []
        mode = Mode(options.mode, options.staleness)
        for server, link in enumerate(links):
            described = describe_table(
                specs, blocks[server], mode, average=options.average, first_key=first_key
            )
            shard = Shard(
                name, server, worker, described,
                partial(self._cut_values, values, server), link.send,
            )  # fmt: skip
            shard.version = self.first_version
            link.add(shard)
            shards.append(shard)
        super().__init__(client, shards)

    @property
    def version(self) -> int:
        """The lowest version of the values that were pulled."""
        return min(shard.version for shard in self._shards)

    def push(self, tensors: Sequence[Array], body: Mapping[str, Any]) -> list[Handle]:
        """Push the gradients of a step, as flat tensors, which are copied.

        Raises `PsRolledBack`.
        """
        self.raise_if_rolled_back()
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
        self.raise_if_rolled_back()
        handles = [self._client.ask(shard.pull) for shard in self._shards]
        for blocks, handle in zip(self._blocks, handles, strict=True):
            try:
                answer = handle.wait()
            except PsRolledBack:
                self._rolled_back = None
                raise
            for block, data in zip(blocks, answer.payloads, strict=True):
                block.scatter(block.view(data), tensors, self._first_key)

    def _cut_values(self, values: Callable[[], Sequence[Array]], server: int) -> list[memoryview]:
        return self._cut(values(), server)

    def _cut(self, tensors: Sequence[Array], server: int) -> list[memoryview]:
        payloads = []
        for block in self._blocks[server]:
            array = self._client.new(block.size, dtype_of(block.dtype))
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
