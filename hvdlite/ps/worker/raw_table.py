"""A table of one tensor, as a worker pushes to it and pulls from it by its name."""

from __future__ import annotations

from functools import partial

import numpy as np

from hvdlite.common.plain.handles import Handle
from hvdlite.ps.connections.messages import Message
from hvdlite.ps.layouts.blocks import Array, dtype_of
from hvdlite.ps.worker.ordered_operations import OrderedOperations, joined, until_settled
from hvdlite.ps.worker.remote_table import RemoteTable
from hvdlite.ps.worker.shard import Shard


class RawTable(RemoteTable):
    """A table whose pushes and pulls are begun in their order, and waited for later."""

    def push_async(self, array: Array) -> Handle:
        """Push a flat array as a step. Raises `PsRolledBack`."""
        self.raise_if_rolled_back()
        self.gate.let_pass()
        handles = []
        for server, shard in enumerate(self._shards):
            begin = partial(shard.push, {}, self._cut([array], server))
            handles.append(self._client.ask(partial(self._operations_of(shard).add, begin)))
        handle = joined(handles, lambda _: None)
        handle.on_end(self.gate.answered)
        return handle

    def pull_async(self) -> Handle:
        """Return a handle of the tensor, which has all that was pushed here before."""
        self.raise_if_rolled_back()
        return until_settled(self._pull_once)

    def _pull_once(self) -> Handle:
        # A table that moves has its blocks first, then its shards, then fails the old ones.
        shards = self._shards
        every = self._blocks
        handles = [
            self._client.ask(partial(self._operations_of(shard).add, shard.pull))
            for shard in shards
        ]
        (spec,) = self.specs

        def finish(answers: list[Message]) -> Array:
            found = np.empty(spec.size, dtype_of(spec.dtype))
            for blocks, answer in zip(every, answers, strict=True):
                for block, data in zip(blocks, answer.payloads, strict=True):
                    block.scatter(block.view(data), [found], self._first_key)
            return found.reshape(spec.shape)

        return joined(handles, finish)

    def refresh(self) -> None:
        """See `TableShards`. Should a server be lost, what was pulled last is offered to it."""
        self.pull_async().wait()

    def _operations_of(self, shard: Shard) -> OrderedOperations:
        if not hasattr(self, "_operations"):
            self._operations: dict[Shard, OrderedOperations] = {}
        return self._operations.setdefault(shard, OrderedOperations())


class FoundTable(RawTable):
    """A table that another worker begins."""

    first_version = -2
