"""What a server process does in the calls that make workers: it serves, until the job has ended."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from hvdlite.ps import context
from hvdlite.ps.description import TableDescription
from hvdlite.ps.raw import PREFIX, raw_updater
from hvdlite.ps.roles import run_server
from hvdlite.ps.updater import Updater


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
