"""Tables that users push to and pull from by name, without an optimizer: pushes are added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite.ps.blocks import Array
from hvdlite.ps.description import TableDescription
from hvdlite.ps.row_store import RowStore
from hvdlite.ps.row_tables import AddedRows
from hvdlite.ps.updater import Updater

PREFIX = "raw."  # The tables of users have it before their names.


class Added:
    """Adds what is pushed to the values."""

    def __init__(self) -> None:
        self._values: list[Array] = []

    def begin(self, values: Sequence[Array]) -> None:
        """See `Updater`."""
        self._values = [array if array.flags.writeable else array.copy() for array in values]

    def values(self) -> list[Array]:
        """See `Updater`."""
        return self._values

    def step(self, gradients: Sequence[Array], numbers: Sequence[Mapping[str, Any]]) -> None:
        """See `Updater`."""
        for values, pushed in zip(self._values, gradients, strict=True):
            np.add(values, pushed, out=values)

    def state(self) -> dict[str, Array]:
        """See `Updater`."""
        return {}

    def load(self, state: Mapping[str, Array]) -> None:
        """See `Updater`."""


def raw_updater(described: TableDescription) -> Updater:
    """Return what adds pushes up."""
    rows = described.rows
    return Added() if rows is None else AddedRows(new_store(described))


def new_store(described: TableDescription) -> RowStore:
    """Return memory for the rows of a table that this server keeps."""
    assert described.rows is not None
    return RowStore(described.name, described.rows.spec)
