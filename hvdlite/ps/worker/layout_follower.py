"""A worker follows the layout: it holds back at borders, and goes to the servers of the next one.

Its methods are called in the client's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hvdlite.ps.connections.messages import Message
from hvdlite.ps.worker.table_shards import TableShards

Request = Callable[[Message, Callable[[Message], None]], None]


class LayoutFollower:
    """Follows what the scheduler says of layouts, with all tables of a worker."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._tables: dict[str, TableShards] = {}
        self._version = 0  # Of the layout in which the tables are.
        self._change = 0  # The identity of the change that is under way.
        self._clocks: dict[str, int] = {}  # Of tables that are quiet.
        self._moving: set[str] | None = None  # Tables that are not in the next layout yet.

    def add(self, table: TableShards) -> bool:
        """Let a table follow; return False for one that was made for a layout of the past."""
        if table.layout < self._version:
            return False
        self._tables[table.name] = table
        if self._change:
            table.gate.close(lambda _clock: None)
        return True

    def hear(self, body: Mapping[str, Any]) -> None:
        """Take the scheduler's latest news."""
        self._version = self._version or body["layout"]
        if body["layout"] > self._version:
            if self._moving is None:
                self._move(body["layout"])
            return
        change = body["change"]
        if change is None:
            if self._change:  # It was given up.
                self._change = 0
                for table in self._tables.values():
                    table.gate.open()
        elif change["identity"] != self._change:
            self._hold_back(change["identity"])
        elif change["borders"] is not None:
            self._set_borders(change["borders"])

    # -- before the border

    def _hold_back(self, change: int) -> None:
        self._change, self._clocks = change, {}
        names = [*self._tables]
        if not names:
            self._report(change)
        for name in names:
            self._tables[name].gate.close(partial(self._note, change, names, name))

    def _note(self, change: int, names: list[str], name: str, clock: int) -> None:
        if change == self._change:
            self._clocks[name] = clock
            if self._clocks.keys() >= set(names):
                self._report(change)

    def _report(self, change: int) -> None:
        body = {"change": change, "clocks": dict(self._clocks)}
        self._request(Message("clocks", body=body), lambda _answer: None)

    def _set_borders(self, borders: Mapping[str, Any]) -> None:
        """Let tables go on up to their borders; in sync, all workers have the same one."""
        for name, border in borders.items():
            table = self._tables.get(name)
            if table is not None and table.is_sync and border:
                table.gate.set_border(max(clock for _, clock in border))

    # -- the next layout

    def _move(self, layout: int) -> None:
        """Ask where the tables are now."""
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
            for table in self._tables.values():
                table.gate.open()
