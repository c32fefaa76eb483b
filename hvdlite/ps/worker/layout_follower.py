"""A worker follows the layout: it holds back at borders, and goes to the servers of the next one.

It holds back, too, while a worker loads; but in sync, where whoever loads may wait for pushes of
others, only when the load counts.

Its methods are called in the client's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hvdlite.ps.connections.messages import Message
from hvdlite.ps.scheduler.registry import is_change_awaited
from hvdlite.ps.worker.table_shards import TableShards

Request = Callable[[Message, Callable[[Message], None]], None]


class LayoutFollower:
    """Follows what the scheduler says of layouts, with all tables of a worker."""

    def __init__(
        self, request: Request, tell: Callable[[], None], number: Callable[[], int]
    ) -> None:
        self._request, self._number = request, number
        self._tell = tell  # Lets the scheduler hear of `standing`.
        self._tables: dict[str, TableShards] = {}
        self._version = 0  # Of the layout in which the tables are.
        self._is_awaited = False  # A change waits until all have begun their tables.
        self._change = 0  # The identity of the change, or the turn of a load, that is under way.
        self._is_load = False
        self._passes_sync = False  # Of a load that does not count yet.
        self._clocks: dict[str, int] = {}  # Of tables that are quiet.
        self._moving: set[str] | None = None  # Tables that are not in the next layout yet.

    def add(self, table: TableShards) -> bool:
        """Let a table follow; return False for one that was made for a layout of the past."""
        if table.layout < self._version:
            return False
        self._tables[table.name] = table
        if self._change:
            self._close(table)
        if self._is_awaited:  # Else the next beat says it: each names all tables.
            self._tell()
        return True

    def standing(self) -> dict[str, Any]:
        """Return the layout in which this worker is, and its tables."""
        return {"layout": self._version, "tables": dict.fromkeys(self._tables, 0)}

    def hear(self, body: Mapping[str, Any]) -> None:
        """Take the scheduler's latest news."""
        self._version = self._version or body["layout"]
        was_awaited, self._is_awaited = self._is_awaited, is_change_awaited(body)
        if self._is_awaited and not was_awaited:
            self._tell()
        if body["layout"] > self._version:
            if self._moving is None:
                self._move(body["layout"])
            return
        change = body["change"]
        identity = body["load"] if change is None else change["identity"]
        passes_sync = change is None and body["decided"] is None
        if not identity:
            if self._change:  # It was given up, or is done.
                self._change = 0
                for table in self._tables.values():
                    table.gate.open()
        elif (identity, passes_sync) != (self._change, self._passes_sync):
            self._is_load, self._passes_sync = change is None, passes_sync
            self._change, self._clocks = identity, {}
            for table in self._tables.values():
                self._close(table)
            self._report_if_quiet()
        elif change is not None and change["borders"] is not None:
            for name, border in change["borders"].items():
                step = dict(border).get(self._number())
                if name in self._tables and step is not None:
                    self._tables[name].gate.set_border(step)

    # -- before the border

    def _close(self, table: TableShards) -> None:
        if self._passes_sync and table.is_sync:
            table.gate.open()
        else:
            table.gate.close(partial(self._note, self._change, table.name))

    def _note(self, change: int, name: str, clock: int) -> None:
        if change == self._change:
            self._clocks[name] = clock
            self._report_if_quiet()

    def _report_if_quiet(self) -> None:
        tables = self._tables.items()
        held = {name for name, table in tables if not (self._passes_sync and table.is_sync)}
        if self._clocks.keys() >= held:
            body = {"change": self._change, "clocks": {name: self._step_of(name) for name in held}}
            self._request(Message("clocks", body=body), lambda _answer: None)

    def _step_of(self, name: str) -> int:
        """Return the step at which a quiet table stands, or that it is to reach before a change.

        Tables that make the same steps come to the next layout at one of them: servers have no
        values of the step before there, with which one of them could be made again.
        """
        table = self._tables[name]
        if self._is_load or not table.peers:
            return self._clocks[name]
        return max(each.known_clock for each in (table, *table.peers))

    # -- the next layout

    def _move(self, layout: int) -> None:
        self._moving = set(self._tables)
        self._end_move(layout)
        for name, table in self._tables.items():
            self._request(table.declaration, partial(self._hear_layout, layout, name))

    def _hear_layout(self, layout: int, name: str, answer: Message) -> None:
        if self._moving is None:
            return
        if answer.kind != "layout":  # The next news make this worker ask again.
            self._moving = None
            return
        table = self._tables[name]
        if table.layout < answer.body["layout"]:
            table.move(answer)
        self._moving.discard(name)
        self._end_move(layout)

    def _end_move(self, layout: int) -> None:
        if not self._moving:
            self._version, self._change, self._moving = layout, 0, None
            self._tell()
            for table in self._tables.values():
                table.gate.open()
