"""A table of one tensor, as a worker pushes to it and pulls from it by its name."""

from __future__ import annotations

import numpy as np

from hvdlite.common.plain.handles import Handle
from hvdlite.ps.connections.messages import Message
from hvdlite.ps.layouts.blocks import Array, dtype_of
from hvdlite.ps.worker.ordered_operations import joined, until_settled
from hvdlite.ps.worker.remote_table import RemoteTable


class RawTable(RemoteTable):
    """A table whose pushes and pulls are begun in their order, and waited for later."""

    def push_async(self, array: Array) -> Handle:
        """Push a flat array as a step. Raises `PsRolledBack`."""
        self.raise_if_rolled_back()
        self.gate.let_pass()
        servers = range(len(self._shards))
        return self._push_parts([self._cut([array], server) for server in servers], {})

    def pull_async(self) -> Handle:
        """Return a handle of the tensor, which has all that was pushed here before."""
        self.raise_if_rolled_back()
        return until_settled(self._pull_once)

    def _pull_once(self) -> Handle:
        # A table that moves has its blocks first, then its shards, then fails the old ones.
        shards = self._shards
        every = self._blocks
        handles = self._pull_parts(shards, [()] * len(shards))
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


class FoundTable(RawTable):
    """A table that another worker begins."""

    first_version = -2
