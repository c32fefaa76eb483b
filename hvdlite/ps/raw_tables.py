"""A table of one tensor, as a worker pushes to it and pulls from it by its name."""

from __future__ import annotations

from functools import partial

import numpy as np

from hvdlite.common.plain.handles import Handle
from hvdlite.ps.blocks import Array, dtype_of
from hvdlite.ps.messages import Message
from hvdlite.ps.turns import Turns, joined
from hvdlite.ps.worker import RemoteTable


class RawTable(RemoteTable):
    """A table whose pushes and pulls are begun in their order, and waited for later."""

    def push_async(self, array: Array) -> Handle:
        """Push a flat array as a step. Raises `PsRolledBack`."""
        self.raise_if_rolled_back()
        turns = self._take_turns()
        handles = []
        for server, shard in enumerate(self._shards):
            begin = partial(shard.push, {}, self._cut([array], server))
            handles.append(self._client.ask(partial(turns[server].add, begin)))
        return joined(handles, lambda _: None)

    def pull_async(self) -> Handle:
        """Return a handle of the tensor, which has all that was pushed here before."""
        self.raise_if_rolled_back()
        turns = self._take_turns()
        handles = [
            self._client.ask(partial(turns[server].add, shard.pull))
            for server, shard in enumerate(self._shards)
        ]
        (spec,) = self.specs

        def finish(answers: list[Message]) -> Array:
            found = np.empty(spec.size, dtype_of(spec.dtype))
            for blocks, answer in zip(self._blocks, answers, strict=True):
                for block, data in zip(blocks, answer.payloads, strict=True):
                    block.scatter(block.view(data), [found], self._first_key)
            return found.reshape(spec.shape)

        return joined(handles, finish)

    def _take_turns(self) -> list[Turns]:
        if not hasattr(self, "_turns"):
            self._turns = [Turns() for _ in self._shards]
        return self._turns


class FoundTable(RawTable):
    """A table that another worker begins."""

    first_version = -2
