"""Tensors on the servers, as one worker pushes to them and pulls all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from hvdlite.common.requests.handles import Handle
from hvdlite.ps.connections.client import Client
from hvdlite.ps.connections.messages import Buffer, Message
from hvdlite.ps.layouts.blocks import Array, Block, TensorSpec, blocks_of, dtype_of
from hvdlite.ps.layouts.layout import Layout
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.description import describe_table
from hvdlite.ps.worker.early_sender import EarlySender, Gone, rest_of
from hvdlite.ps.worker.ordered_operations import Begin, MovedError
from hvdlite.ps.worker.server_link import ServerLink
from hvdlite.ps.worker.shard import PsRolledBack
from hvdlite.ps.worker.table_shards import TableShards


def new_memory(client: Client, block: Block) -> Array:
    """Return memory for a block, from which a client sends it."""
    return client.new(block.size, dtype_of(block.dtype))


class RemoteTable(TableShards):
    """A table on the servers, as one worker pushes to it and pulls from it.

    `answer` says where the parts are, and `values` gives flat tensors to begin with.
    """

    def __init__(
        self, answer: Message, specs: Sequence[TensorSpec], options: TableOptions,
        values: Callable[[], Sequence[Array]], client: Client,
        links: Callable[[int], Sequence[ServerLink]], worker: int, declaration: Message,
    ) -> None:  # fmt: skip
        self.specs, self._values = list(specs), values
        self._sizes = [spec.size for spec in self.specs]
        super().__init__(answer, options, client, links, worker, declaration)
        self._begin_early()

    def _look_at(self, answer: Message) -> None:
        servers, self._first_key = answer.body["servers"], answer.body["first_key"]
        layout = Layout.of(answer.body["parts"], servers)
        self._blocks = [blocks_of(self.specs, self._first_key, layout, n) for n in range(servers)]

    def _describe(self, server: int, servers: int) -> Mapping[str, Any]:
        return describe_table(
            self.specs, self._blocks[server], self.options.clock_mode,
            average=self.options.average, first_key=self._first_key,
        )  # fmt: skip

    def _first_values(self, server: int) -> Sequence[Buffer]:
        return self._cut(self._values(), server)

    def _begin_early(self) -> None:
        """Send pieces to the shards of this layout from now on.

        What was sent before belongs to shards that are retired, so that the push is sent whole, or
        its pieces by the new ones.
        """
        sender = EarlySender(self._blocks, self._first_key, partial(new_memory, self._client))
        self._early = sender, self._shards, self._links(len(self._shards))

    def move(self, answer: Message) -> None:
        """See `TableShards`."""
        super().move(answer)
        self._begin_early()

    def last_values(self) -> list[Array] | None:
        """Return what was pulled last, as flat tensors; None where nothing of one version was."""
        if self.is_sync and len({shard.version for shard in self._shards}) > 1:
            return None
        tensors = [np.empty(spec.size, dtype_of(spec.dtype)) for spec in self.specs]
        for blocks, shard in zip(self._blocks, self._shards, strict=True):
            if shard.pulled is None:
                return None
            for block, data in zip(blocks, shard.pulled, strict=True):
                block.scatter(block.view(data), tensors, self._first_key)
        return tensors

    def first_changed(self, tensors: Iterable[Array]) -> str | None:
        """Return the name of the first tensor that is not what was pulled last; None: all are."""
        for spec, own, pulled in zip(self.specs, tensors, self.last_values() or (), strict=False):
            if own.tobytes() != pulled.tobytes():
                return spec.name
        return None

    def _pulled(self) -> Callable[[int], Sequence[Buffer] | None]:
        tensors = self.last_values()
        return (lambda server: None) if tensors is None else partial(self._cut, tensors)

    def push(self, tensors: Sequence[Array], body: Mapping[str, Any]) -> Handle:
        """Push the gradients of a step, as flat tensors, which are copied.

        Without any, the step is skipped. Raises `PsRolledBack`, and ValueError for tensors that are
        not those of the table.
        """
        if tensors and [tensor.size for tensor in tensors] != self._sizes:
            raise ValueError(
                f"gradients of {[tensor.size for tensor in tensors]} elements are pushed to the "
                f"table '{self.name}', whose tensors have {self._sizes}"
            )
        try:
            self.raise_if_rolled_back()
        except PsRolledBack:
            self._early[0].end(())
            raise
        return self._begin_push(partial(self._pushes_of, tensors, body), in_order=False)

    def _pushes_of(self, tensors: Sequence[Array], body: Mapping[str, Any]) -> list[Begin]:
        pushes: list[Begin] = []
        early = self._early[0].end(tensors)
        for server, shard in enumerate(self._shards):
            gone = early.get(server)
            payloads = self._cut(tensors, server, gone) if tensors else []
            rest = gone and rest_of(self._blocks[server], gone, payloads)
            pushes.append(partial(shard.push, body, payloads, rest=rest))
        return pushes

    def push_early(self, tensor: int, gradient: Callable[[], Array]) -> None:
        """Send what is large of the flat gradient of a tensor, if it goes to another host.

        The push compares it with what it is given then. May be called in any thread; pieces go in
        the order of the calls.
        """
        sender, shards, links = self._early
        far = [server for server, link in enumerate(links) if not link.shares_memory]
        if far and sender.wants(tensor):
            for server, body, payload in sender.pieces_of(tensor, gradient(), far=far):
                self._client.call(partial(shards[server].push_piece, body, payload))

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
                self.forget_rollback()
                # A worker that has made no step here has lost none: it begins where servers stand.
                if self.has_pushed:
                    raise
        for blocks, answer in zip(every, answers, strict=True):
            for block, data in zip(blocks, answer.payloads, strict=True):
                block.scatter(block.view(data), tensors, self._first_key)

    def _cut(self, tensors: Sequence[Array], server: int, gone: Gone | None = None) -> list[Buffer]:
        """Return the payloads of a server; what has gone lies in some of them already."""
        payloads: list[Buffer] = []
        for number, block in enumerate(self._blocks[server]):
            if (small := block.small_copy(tensors, self._first_key)) is not None:
                payloads.append(small)  # Parts of such a size are never sent early.
                continue
            if gone is None or number not in gone.arrays:
                array = new_memory(self._client, block)
                block.gather(tensors, self._first_key, array)
            else:
                array = gone.arrays[number]
                here = {(each.start, each.stop) for each in gone.pieces if each.block == number}
                block.gather_others(tensors, self._first_key, array, here)
            payloads.append(memoryview(array.view("u1").data))
        return payloads
