"""What a server process does in the calls that make workers: it serves, until the job has ended."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from hvdlite.ps import context
from hvdlite.ps.roles import run_server
from hvdlite.ps.tables.description import TableDescription
from hvdlite.ps.tables.row_store import RowStore
from hvdlite.ps.tables.row_table import AddedRows
from hvdlite.ps.tables.updater import Added, Updater

PREFIX = "raw."  # The tables of users have it before their names.


def serve(new_updater: Callable[[TableDescription], Updater] | None = None) -> NoReturn:
    """Be a server until all workers have left, then end the process.

    `new_updater` makes what holds the tables of an optimizer. What `ps.push` and `ps.push_rows`
    made a table of is added to.
    """

    def updater_for(described: TableDescription) -> Updater:
        if described.name.startswith(PREFIX):
            return raw_updater(described)
        if new_updater is None:
            raise ValueError(
                f"this server has no optimizer for the table '{described.name}': make the "
                "DistributedOptimizer before the first call of push, pull or start"
            )
        return new_updater(described)

    run_server(context.current().settings, updater_for)
    sys.exit(0)


def raw_updater(described: TableDescription) -> Updater:
    """Return what adds pushes up."""
    rows = described.rows
    return Added() if rows is None else AddedRows(new_store(described))


def new_store(described: TableDescription) -> RowStore:
    """Return memory for the rows of a table that this server keeps."""
    assert described.rows is not None
    return RowStore(described.name, described.rows.spec)
