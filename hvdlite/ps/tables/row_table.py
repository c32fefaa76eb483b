"""A table of rows on one server: some rows are pushed, and some are pulled.

It is begun by the server, and has no other copy anywhere. In a push, as in all that is passed on
here, the ids of rows come first, each once, then an array with one row for each of them.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlite.ps.connections.messages import Answer, Message
from hvdlite.ps.layouts.blocks import Array, dtype_of
from hvdlite.ps.tables.clocks import SYNC
from hvdlite.ps.tables.row_store import RowShare, RowStore
from hvdlite.ps.tables.table import Saved, Table
from hvdlite.ps.tables.updater import Updater, wide_dtype


class AddedRows(Updater):
    """Holds rows, and adds what is pushed to them.

    Its `values` are their ids and themselves, so are gradients.
    """

    def __init__(self, store: RowStore) -> None:
        self.store = store

    def begin(self, values: Sequence[Array]) -> None:
        if values:
            self.store.load(values[0], values[1].reshape(-1, self.store.spec.length), {})

    def values(self) -> list[Array]:
        return [self.store.ids, self.store.values]

    def take(self, ids: NDArray[np.int64]) -> Array:
        """Return rows, which are made where they were never asked for."""
        places = self.store.places(ids)
        return self.store.values[places]

    def step(self, gradients: Sequence[Array], numbers: Sequence[Mapping[str, Any]]) -> None:
        ids, rows = gradients
        places = self.store.places(ids)
        self.store.values[places] += rows


class RowTable(Table):
    """A table of rows. Each push has at most one row of an id."""

    updater: AddedRows
    # Of sync: the version before this one, the rows that the update has changed, and as they were.
    _before: tuple[int, NDArray[np.int64], Array] | None = None

    @property
    def rows(self) -> RowShare:
        """Which rows there are, and which of them are here."""
        assert self.described.rows is not None
        return self.described.rows

    def pull(self, peer: bytes, worker: int, message: Message) -> list[Answer]:
        self.rows.check(_ids_of(message))
        return super().pull(peer, worker, message)

    def has(self, version: int) -> bool:
        return version >= self.version or (self._before is not None and self._before[0] == version)

    def replace(self, values: Sequence[Array], state: Mapping[str, Array]) -> None:
        super().replace(values, state)
        self._before = None

    def remember(self, saved: Saved) -> None:
        """See `Table`. Rows that were made since had their first values then."""
        if self.clocks.mode.name == SYNC and not self.failure:
            ids, rows = saved.values
            before = RowStore(self.name, self.rows.spec)
            before.load(ids, rows.reshape(-1, self.rows.spec.length), {})
            ids = np.sort(self.updater.values()[0])
            places = before.places(ids)
            old = before.values[places]
            is_other = (old != self.updater.take(ids)).any(axis=1)
            self._before = saved.version, ids[is_other], old[is_other]

    def _look(self, workers: Collection[int]) -> list[Answer]:
        """Begin when the first worker has come: no worker has values that are needed."""
        if not self.begun and not self._starts.waiting.keys().isdisjoint(workers):
            if self._restored:
                self.begun = True
                return super()._look(workers)
            version = max(self.reached, *(s.version for s in self._starts.waiting.values()), 0)
            if version or self.load:
                raise self._lost_error(version)
            with self._failing("taking first values"):
                self.updater.begin([])
            if self.failure:
                return self._refuse_all()
            for number in workers:
                self.clocks.finished.setdefault(number, self.version)
            self.begun = True
        return super()._look(workers) if self.begun else []

    def _gradients_of(self, message: Message) -> list[Array]:
        ids, spec = _ids_of(message), self.rows.spec
        self.rows.check(ids)
        rows = np.frombuffer(message.payloads[1], dtype_of(spec.dtype))
        if rows.size != len(ids) * spec.length:
            raise ValueError(f"{len(ids)} rows of {spec.length} come with {rows.size} values")
        return [ids, rows.reshape(len(ids), spec.length)]

    def _sum(self, given: Sequence[list[Array]]) -> list[Array]:
        """Return the sum of each row in the order of the workers' numbers, or the average."""
        return add_rows(given, average=self.described.average)

    def _scaled(self, gradients: list[Array]) -> list[Array]:
        ids, rows = gradients
        return [ids, *super()._scaled([rows])]

    def _keep(self, gradients: list[Array] | None) -> None:
        ids = np.empty(0, np.int64) if gradients is None else gradients[0]
        self._before = self.version, ids, self.updater.take(ids)

    def _values_for(self, pull: Message) -> tuple[int, Sequence[Array]]:
        """Return rows; in sync they are those that the step of the pull begins with."""
        ids, version = _ids_of(pull), self.version
        rows = np.ascontiguousarray(self.updater.take(ids))
        if self._before is not None and self._before[0] == pull.clock:
            version, updated, old = self._before
            _, own, others = np.intersect1d(ids, updated, assume_unique=True, return_indices=True)
            rows[own] = old[others]
        return version, [rows]

    def _values_of(self, version: int) -> list[Array]:
        return [array.copy() for array in self.updater.values()]


def add_rows(addends: Sequence[Sequence[Array]], *, average: bool) -> list[Array]:
    """Return all ids, sorted, and the sum of their rows in the order of the addends.

    A row that an addend does not have counts as zeros. 16-bit floats are added in float32.
    """
    dtype = addends[0][1].dtype
    ids = np.unique(np.concatenate([ids for ids, _ in addends]))
    total = np.zeros((len(ids), addends[0][1].shape[1]), wide_dtype(dtype))
    for own, rows in addends:
        total[np.searchsorted(ids, own)] += rows
    if average and len(addends) > 1:
        total *= total.dtype.type(1 / len(addends))
    return [ids, total.astype(dtype, copy=False)]


def merge_repeated(ids: NDArray[np.int64], rows: Array) -> list[Array]:
    """Return each id once, sorted, and the sums of its rows in the order in which they are given.

    16-bit floats are added in float32.
    """
    unique, inverse = np.unique(ids, return_inverse=True)
    if len(unique) == len(ids):
        merged = np.empty_like(rows)
        merged[inverse] = rows
        return [unique, merged]
    total = np.zeros((len(unique), rows.shape[1]), wide_dtype(rows.dtype))
    np.add.at(total, inverse, rows.astype(total.dtype, copy=False))
    return [unique, total.astype(rows.dtype, copy=False)]


def _ids_of(message: Message) -> NDArray[np.int64]:
    return np.frombuffer(message.payloads[0], np.int64)
