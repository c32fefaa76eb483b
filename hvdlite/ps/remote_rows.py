"""Rows on the servers, as one worker pushes to them and pulls some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.plain.handles import Handle
from hvdlite.ps.blocks import Array, TensorSpec, dtype_of
from hvdlite.ps.client import Client
from hvdlite.ps.clocks import Mode
from hvdlite.ps.messages import Message
from hvdlite.ps.registry import TableOptions
from hvdlite.ps.row_store import RowsSpec
from hvdlite.ps.row_tables import RowShare, merge_repeated
from hvdlite.ps.server import describe_table
from hvdlite.ps.shard import Shard
from hvdlite.ps.table_shards import TableShards
from hvdlite.ps.tables import SKIP
from hvdlite.ps.turns import Done, Turns, joined


class RemoteRows(TableShards):
    """A table of rows on the servers. `new_shard` connects a shard with its server."""

    def __init__(
        self, spec: TensorSpec, options: TableOptions, client: Client, servers: int,
        new_shard: Callable[[int, Mapping[str, Any]], Shard],
    ) -> None:  # fmt: skip
        assert options.rows is not None
        self.name, self.spec = spec.name, RowsSpec(*options.rows)
        self._servers = servers
        self._turns = [Turns() for _ in range(servers)]
        shards = []
        mode = Mode(options.mode, options.staleness)
        for server in range(servers):
            share = RowShare(self.spec, server, servers)
            about = describe_table([spec], [], mode, average=options.average, rows=share)
            shards.append(new_shard(server, about))
        super().__init__(client, shards)

    def push(self, ids: Any, rows: Any, body: Mapping[str, Any] | None = None) -> Handle:
        """Push the gradients of rows, an array of shape (len(ids), length), as one step.

        Rows of an id that is repeated are added up in their order. Raises TypeError and ValueError
        for ids and rows that do not fit, and `PsRolledBack`.
        """
        self.raise_if_rolled_back()
        ids = self.checked_ids(ids)
        rows = np.asarray(rows)
        shape = len(ids), self.spec.length
        if rows.shape != shape or rows.dtype != dtype_of(self.spec.dtype):
            raise ValueError(
                f"rows of {self.name!r} are {rows.dtype} of shape {rows.shape}, and "
                f"{self.spec.dtype} of shape {shape} belong to {len(ids)} ids"
            )
        unique, merged = merge_repeated(ids, rows)
        return self._push_parts(
            [
                [_bytes(unique[of_server]), _bytes(merged[of_server])]
                for of_server in self._of_servers(unique)
            ],
            body or {},
        )

    def skip(self) -> Handle:
        """Push a step that all workers skip."""
        return self._push_parts([()] * self._servers, {SKIP: True})

    def _push_parts(self, parts: Sequence[Sequence[memoryview]], body: Mapping[str, Any]) -> Handle:
        handles = [
            self._ask(server, partial(self._shards[server].push, body, payloads))
            for server, payloads in enumerate(parts)
        ]
        return joined(handles, lambda _: None)

    def pull(self, ids: Any) -> Handle:
        """Return a handle of the rows that the next step needs: an array of (len(ids), length).

        Raises TypeError and ValueError for ids that do not fit, and `PsRolledBack`.
        """
        self.raise_if_rolled_back()
        unique, inverse = np.unique(self.checked_ids(ids), return_inverse=True)
        of_servers = self._of_servers(unique)
        handles = [
            self._ask(server, partial(_pull, self._shards[server], [_bytes(unique[of_server])]))
            for server, of_server in enumerate(of_servers)
        ]

        def finish(answers: list[Message]) -> Array:
            dtype = dtype_of(self.spec.dtype)
            found = np.empty((len(unique), self.spec.length), dtype)
            for of_server, answer in zip(of_servers, answers, strict=True):
                rows = np.frombuffer(answer.payloads[0], dtype)
                found[of_server] = rows.reshape(-1, self.spec.length)
            return found[inverse.reshape(-1)]

        return joined(handles, finish)

    def checked_ids(self, ids: Any) -> NDArray[np.int64]:
        """Return ids as int64. Raises TypeError and ValueError that name what is wrong."""
        given = np.asarray(ids)
        if given.size == 0 and not isinstance(ids, np.ndarray):
            given = given.astype(np.int64)
        if given.dtype.kind not in "iu":
            raise TypeError(f"ids of rows of {self.name!r} are {given.dtype}: give integers")
        if given.ndim != 1:
            raise ValueError(
                f"ids of rows of {self.name!r} have the shape {given.shape}: give (n,)"
            )
        if given.size:
            for number in (int(given.min()), int(given.max())):
                if not 0 <= number < self.spec.count:
                    raise ValueError(
                        f"{self.name!r} has no row {number}: its {self.spec.count} rows are "
                        f"numbered from 0 to {self.spec.count - 1}"
                    )
        return given.astype(np.int64, copy=False)

    # -- parts

    def _of_servers(self, ids: NDArray[np.int64]) -> list[NDArray[np.intp]]:
        """Return where the rows of each server are in `ids`."""
        owners = ids % self._servers
        return [np.flatnonzero(owners == server) for server in range(self._servers)]

    def _ask(self, server: int, begin: Callable[[Done], object]) -> Handle:
        return self._client.ask(lambda done: self._turns[server].add(begin, done))


def _pull(shard: Shard, payloads: Sequence[memoryview], done: Done) -> None:
    shard.pull(done, payloads)


def _bytes(array: Array) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
