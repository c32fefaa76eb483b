"""Rows on the servers, as one worker pushes to them and pulls some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.requests.handles import Handle
from hvdlite.ps.connections.client import Client, Plan
from hvdlite.ps.connections.messages import Message
from hvdlite.ps.layouts.blocks import Array, TensorSpec, dtype_of
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.description import describe_table
from hvdlite.ps.tables.row_store import RowShare, RowsSpec
from hvdlite.ps.tables.row_table import merge_repeated
from hvdlite.ps.tables.table import SKIP
from hvdlite.ps.worker.server_link import ServerLink
from hvdlite.ps.worker.shard import PsRolledBack
from hvdlite.ps.worker.table_shards import TableShards


class RemoteRows(TableShards):
    """A table of rows on the servers."""

    kinds = "_rows"

    def __init__(
        self, answer: Message, spec: TensorSpec, options: TableOptions, client: Client,
        links: Callable[[int], Sequence[ServerLink]], worker: int, declaration: Message,
    ) -> None:  # fmt: skip
        assert options.rows is not None
        self.spec, self.specs = RowsSpec(*options.rows), [spec]
        self.numbers: Sequence[Mapping[str, Any]] = ()  # Hyperparameters for pushes without a body.
        super().__init__(answer, options, client, links, worker, declaration)

    @property
    def is_whole(self) -> bool:
        return False

    def _describe(self, server: int, servers: int) -> Mapping[str, Any]:
        share = RowShare(self.spec, server, servers)
        mode, average = self.options.clock_mode, self.options.average
        return describe_table(self.specs, [], mode, average=average, rows=share)

    def raise_if_rolled_back(self) -> None:
        """See `TableShards`. Tables beside it have the values of the step that is next then."""
        try:
            super().raise_if_rolled_back()
        except PsRolledBack:
            for table in self.peers:
                table.renew()
            raise

    def push(self, ids: Any, rows: Any, body: Mapping[str, Any] | None = None) -> Handle:
        """Push the gradients of rows, an array of shape (len(ids), length), as one step.

        Rows of an id that is repeated are added up in their order. Raises TypeError and ValueError
        for ids and rows that do not fit, and `PsRolledBack`.
        """
        ids, rows = self.checked(ids, rows)
        self.raise_if_rolled_back()
        unique, merged = merge_repeated(ids, rows)

        def parts(servers: int) -> list[list[memoryview]]:
            return [
                [_bytes(unique[of_server]), _bytes(merged[of_server])]
                for of_server in _of_servers(unique, servers)
            ]

        return self._push_parts(parts, body or ({"numbers": self.numbers} if self.numbers else {}))

    def checked(self, ids: Any, rows: Any) -> tuple[NDArray[np.int64], Array]:
        """Return what `push` takes. Raises TypeError and ValueError as that."""
        ids = self.checked_ids(ids)
        rows = np.asarray(rows)
        shape = len(ids), self.spec.length
        if rows.shape != shape or rows.dtype != dtype_of(self.spec.dtype):
            raise ValueError(
                f"rows of {self.name!r} are {rows.dtype} of shape {rows.shape}, and "
                f"{self.spec.dtype} of shape {shape} belong to {len(ids)} ids"
            )
        return ids, rows

    def skip(self) -> Handle:
        """Push a step that all workers skip."""
        return self._push_parts(lambda servers: [()] * servers, {SKIP: True})

    def pull(self, ids: Any) -> Handle:
        """Return a handle of the rows that the next step needs: an array of (len(ids), length).

        Raises TypeError and ValueError for ids that do not fit, and `PsRolledBack`.
        """
        self.raise_if_rolled_back()
        unique, inverse = np.unique(self.checked_ids(ids), return_inverse=True)
        places = inverse.reshape(-1)
        return self._pull_parts(partial(self._plan_pull, unique, places))

    def _plan_pull(self, ids: NDArray[np.int64], places: NDArray[np.intp]) -> Plan:
        """Return how each of these ids is pulled once, and its rows are put to their places."""
        shards = self._shards
        of_servers = _of_servers(ids, len(shards))

        def finish(answers: list[Message]) -> Array:
            dtype = dtype_of(self.spec.dtype)
            found = np.empty((len(ids), self.spec.length), dtype)
            for of_server, answer in zip(of_servers, answers, strict=True):
                rows = np.frombuffer(answer.payloads[0], dtype)
                found[of_server] = rows.reshape(-1, self.spec.length)
            return found[places]

        pulls = [
            self._pull_of(shard, [_bytes(ids[each])])
            for shard, each in zip(shards, of_servers, strict=True)
        ]
        return pulls, finish

    def checked_ids(self, ids: Any) -> NDArray[np.int64]:
        """Return ids as int64. Raises TypeError and ValueError that name what is wrong."""
        given = np.asarray(ids)
        if given.size == 0:  # numpy takes an empty list for floats.
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


def _of_servers(ids: NDArray[np.int64], servers: int) -> list[NDArray[np.intp]]:
    owners = ids % servers
    return [np.flatnonzero(owners == server) for server in range(servers)]


def _bytes(array: Array) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
