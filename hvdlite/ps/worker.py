"""A worker of a cluster: its tables, which lie on the servers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.plain.handles import Handle
from hvdlite.common.runtime.state import find as find_runtime
from hvdlite.ps.blocks import Array, Block, TensorSpec, blocks_of, dtype_of
from hvdlite.ps.client import Client
from hvdlite.ps.early import EarlyPushes
from hvdlite.ps.enrolment import Enrolment
from hvdlite.ps.follower import LayoutFollower
from hvdlite.ps.layout import Layout, Part
from hvdlite.ps.link import ServerLink
from hvdlite.ps.messages import Message
from hvdlite.ps.pieces import Rest
from hvdlite.ps.records import Records
from hvdlite.ps.registry import TableOptions
from hvdlite.ps.remote_rows import RemoteRows
from hvdlite.ps.server import describe_table
from hvdlite.ps.settings import ANSWER_SECONDS, WORKER, ClusterSettings
from hvdlite.ps.shard import MovedError, PsRolledBack, Shard
from hvdlite.ps.table_shards import TableShards
from hvdlite.ps.turns import joined

WATCH_SECONDS = 1.0

AnyTable = TypeVar("AnyTable", bound=TableShards)


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
        self._follower = LayoutFollower(self._enrolment.request)
        try:
            self._enrolment.enter(settings.start_seconds + ANSWER_SECONDS)
        except BaseException:
            self._client.close()
            raise
        self._client.on_failure = self._fail
        self._client.every(WATCH_SECONDS, self._watch)
        rank = None if settings.independent else find_runtime()
        self._client.records = Records.by_settings(
            os.environ, WORKER, self.number, None if rank is None else rank.timeline
        )
        self.size = settings.num_workers
        self._barriers = 0  # That this process has come to.
        self.loads = 0  # How many times the tables were loaded.
        self.named: dict[str, RemoteTable | RemoteRows] = {}  # The tables of this worker.

    @property
    def number(self) -> int:
        """The number of this worker."""
        assert self._enrolment.number is not None
        return self._enrolment.number

    def _change(self, body: Mapping[str, Any]) -> None:
        """Follow the servers to their addresses, in the client."""
        if self._enrolment.number is None:
            return  # The welcome, which comes later, says the same.
        for number, address, _incarnation in body["servers"]:
            if number not in self._servers:
                link = ServerLink(self._client, number, lambda: self.number, self._token)
                self._servers[number] = link
            self._servers[number].follow(address)
        self._follower.hear(body)
        there = {number for number, _, _ in body["servers"]}
        for number in [each for each in self._servers if each not in there]:
            if number >= body["layout_servers"] and not self._servers[number].is_used:
                self._servers.pop(number).close()
        if body["failure"]:
            self._fail(HorovodInternalError(body["failure"]))

    def _fail(self, error: Exception) -> None:
        """Fail all that waits for servers or the scheduler, or will."""
        self.failure = str(error)
        for link in self._servers.values():
            link.fail(error)
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
        declaration = _declaration(name, specs, options)

        def make(answer: Message) -> RemoteTable:
            return (form or RemoteTable)(
                answer, specs, options, values, self._client, self._links, self.number, declaration
            )

        table = self.named[name] = self._follow(declaration, make)
        return table

    def declare_rows(self, spec: TensorSpec, options: TableOptions) -> RemoteRows:
        """Return a table of rows that all workers declare alike; its name is that of `spec`.

        Raises `HorovodInternalError` where workers disagree.
        """
        declaration = _declaration(spec.name, [spec], options)

        def make(answer: Message) -> RemoteRows:
            return RemoteRows(
                answer, spec, options, self._client, self._links, self.number, declaration
            )

        table = self.named[spec.name] = self._follow(declaration, make)
        return table

    def find(self, name: str) -> tuple[list[TensorSpec], TableOptions] | None:
        """Return what other workers have declared a table to be; None where nobody has."""
        body = self.ask(Message("declare", 0, name)).body
        if not body["specs"]:
            return None
        specs = [TensorSpec(n, d, tuple(shape), group) for n, d, shape, group in body["specs"]]
        return specs, TableOptions(*body["options"])

    def _follow(self, declaration: Message, make: Callable[[Message], AnyTable]) -> AnyTable:
        """Return a table that is where the scheduler says, and follows it wherever it goes."""
        while True:
            answer = self.ask(declaration)
            try:
                table = make(answer)
            except MovedError:
                continue
            if self._client.ask(partial(self._add, table)).wait().kind == "done":
                return table

    def _add(self, table: TableShards, done: Callable[[Message | Exception], None]) -> None:
        done(Message("done" if self._follower.add(table) else "moved"))

    def _links(self, servers: int) -> list[ServerLink]:
        return [self._servers[number] for number in range(servers)]

    def scale_servers(self, servers: int) -> None:
        """Let the cluster have fewer servers: those with the highest numbers end.

        Returns when the scheduler has taken note of it. Raises `HorovodInternalError` for a number
        that is not lower than the present one; a server that is started with HVDLITE_PS_JOIN=1 is
        one more.
        """
        self.ask(Message("scale", body={"servers": servers}))

    def barrier(self) -> None:
        """Wait until all workers have come here."""
        self._barriers += 1
        self.ask(Message("barrier", body={"count": self._barriers}))

    def ask(self, message: Message) -> Message:
        """Return the scheduler's answer. Raises `HorovodInternalError` where it refuses."""
        while True:
            handle = self._client.ask(lambda done: self._enrolment.request(message, done))
            answer: Message = handle.wait()
            if answer.kind == "failed":
                raise HorovodInternalError(answer.body["why"], job_goes_on=not self.failure)
            if answer.kind != "restarted":  # Else the scheduler has to hear of this worker first.
                return answer

    def ask_servers(self, servers: int, message: Message) -> list[Message]:
        """Return what servers answer, beginning with server 0. Raises where one is lost for good.

        Raises `MovedError` where the cluster has fewer servers.
        """
        if any(number not in self._servers for number in range(servers)):
            raise MovedError()
        links = self._links(servers)
        handles = [self._client.ask(partial(link.ask, message)) for link in links]
        return [handle.wait() for handle in handles]

    def leave(self) -> None:
        """Let the others go on without this worker, and end its connections."""
        for server in [each for each in [*self._servers.values()] if each.is_used]:
            self._client.ask(server.leave).ended_within(5.0)
        self._enrolment.leave()
        self.close()

    def close(self) -> None:
        """End the connections without a word."""
        self._client.close()
        self._client.records.close()


class RemoteTable(TableShards):
    """A table on the servers, as one worker pushes to it and pulls from it.

    `answer` is the scheduler's to `declaration`, and says where the parts are.
    """

    first_version = -1  # -2: another worker has the values to begin with.

    def __init__(
        self, answer: Message, specs: Sequence[TensorSpec], options: TableOptions,
        values: Callable[[], Sequence[Array]], client: Client,
        links: Callable[[int], Sequence[ServerLink]], worker: int, declaration: Message,
    ) -> None:  # fmt: skip
        self.name = answer.table
        self.specs, self._options, self._values = list(specs), options, values
        self._links, self._worker = links, worker
        self._first_key = answer.body["first_key"]
        self._blocks = self._blocks_of(answer)
        self._staging: list[list[Array]] = []
        self._client = client
        shards = self._new_shards(answer)
        self._early = self._new_early(shards)
        super().__init__(client, shards, options.mode, declaration, answer.body["layout"])

    def _blocks_of(self, answer: Message) -> list[list[Block]]:
        servers = answer.body["servers"]
        layout = Layout(tuple(Part(*part) for part in answer.body["parts"]), (), servers)
        return [blocks_of(self.specs, self._first_key, layout, n) for n in range(servers)]

    def _new_shards(self, answer: Message) -> list[Shard]:
        shards = []
        mode, average = self._options.clock_mode, self._options.average
        for server, link in enumerate(self._links(answer.body["servers"])):
            described = describe_table(
                self.specs, self._blocks[server], mode, average=average, first_key=self._first_key
            )
            shard = Shard(
                self.name, server, self._worker, described,
                partial(self._cut_values, self._values, server), link.send,
                layout=answer.body["layout"],
            )  # fmt: skip
            shard.version, shard.first = self.first_version, answer.body.get("first")
            link.add(shard)
            shards.append(shard)
        return shards

    def _new_early(self, shards: Sequence[Shard]) -> EarlyPushes:
        links = self._links(len(shards))
        return EarlyPushes(self._client, self._blocks, self._first_key, shards, links)

    @property
    def is_whole(self) -> bool:
        """See `TableShards`."""
        return self._options.part_bytes is None

    def move(self, answer: Message) -> None:
        """See `TableShards`. What was pulled last stays known, should a server be lost."""
        pulled = self._pulled_tensors()
        version, old = self.version, self._shards
        self._blocks = self._blocks_of(answer)
        shards = self._new_shards(answer)
        for server, shard in enumerate(shards):
            values = None if pulled is None else self._cut(pulled, server)
            shard.take_over(old[min(server, len(old) - 1)], version, values)
        self._early = self._new_early(shards)
        self._replace_shards(shards, answer.body["layout"])

    def _pulled_tensors(self) -> list[Array] | None:
        """Return the values that were pulled last, as flat tensors; None before the first pull."""
        tensors = [np.empty(spec.size, dtype_of(spec.dtype)) for spec in self.specs]
        for blocks, shard in zip(self._blocks, self._shards, strict=True):
            if shard.pulled is None:
                return None
            for block, data in zip(blocks, shard.pulled, strict=True):
                block.scatter(block.view(data), tensors, self._first_key)
        return tensors

    @property
    def version(self) -> int:
        """The lowest version of the values that were pulled."""
        return min(shard.version for shard in self._shards)

    def push(self, tensors: Sequence[Array], body: Mapping[str, Any]) -> list[Handle]:
        """Push the gradients of a step, as flat tensors, which are copied.

        Raises `PsRolledBack`.
        """
        try:
            self.raise_if_rolled_back()
        except PsRolledBack:
            self._early.end(())
            raise
        self.gate.let_pass()
        handles = []
        rest_of = self._early.end(tensors)
        for server, shard in enumerate(self._shards):
            payloads = self._cut(tensors, server) if tensors else []
            rest = rest_of(server, payloads)
            handles.append(self._client.ask(_push(shard, body, payloads, rest)))
        joined(handles, lambda _: None).on_end(self.gate.answered)
        return handles

    def push_early(self, tensor: int, gradient: Callable[[], Array]) -> None:
        """Send what is large of the flat gradient of a tensor, if it goes to another host.

        The push compares it with what it is given then. May be called in any thread.
        """
        self._early.send(tensor, gradient)

    def pull(self, tensors: Sequence[Array]) -> None:
        """Pull the values that the next step needs into flat tensors.

        Raises `PsRolledBack`, and `HorovodInternalError` where a server is lost for good.
        """
        self.raise_if_rolled_back()
        while True:
            # A table that moves has its blocks first, then its shards, then fails the old ones.
            shards = self._shards
            every = self._blocks
            handles = [self._client.ask(shard.pull) for shard in shards]
            try:
                answers = [handle.wait() for handle in handles]
                break
            except MovedError:
                continue
            except PsRolledBack:
                self._rolled_back = None
                raise
        for blocks, answer in zip(every, answers, strict=True):
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


def _declaration(name: str, specs: Sequence[TensorSpec], options: TableOptions) -> Message:
    body = {
        "specs": [[spec.name, spec.dtype, list(spec.shape), spec.group] for spec in specs],
        "options": list(options),
    }
    return Message("declare", 0, name, body=body)


def _push(
    shard: Shard, body: Mapping[str, Any], payloads: Sequence[memoryview], rest: Rest | None
) -> Callable[[Callable[[Message | Exception], None]], None]:
    return lambda done: shard.push(body, payloads, done, rest)


def _identity(settings: ClusterSettings, number: int | None) -> bytes:
    name = settings.node_id or str(number)
    return f"{settings.role} {name} {os.getpid()} {os.urandom(4).hex()}".encode()
