"""Servers come and go while workers train: the decisions of the scheduler.

A change is made at a border between steps. All workers hold their pushes back, and say which step
each would push next. In sync, the border is the highest of these steps, and workers that are
behind it go on up to there; in the other modes, each worker has a border of its own. Every server
that has all pushes before the border sends what others keep in the next layout to them. When all
of them have what they need, the next layout is the one that counts. Until then, the change can be
given up at any time, and begun again.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdlite.ps.layouts.layout import Layout, Move, moves
from hvdlite.ps.tables.clocks import SYNC


@dataclass
class Change:
    """One attempt to get to the next layout. Its `identity` is that of no other attempt."""

    identity: int
    layout: Layout
    old_layout: Layout
    modes: Mapping[str, str]  # Of each table.
    clocks: dict[int, Mapping[str, int]] = field(default_factory=dict)  # Of workers that hold back.
    ready: set[int] = field(default_factory=set)  # Servers that have what they need.
    borders: dict[str, dict[int, int]] | None = None  # Table -> worker -> its first step after it.

    def servers(self) -> int:
        """Return how many servers take part: those of both layouts."""
        return max(self.layout.num_servers, self.old_layout.num_servers)

    def report(self, worker: int, clocks: Mapping[str, int]) -> None:
        """Take note that a worker holds its pushes back, and of the next step of each table."""
        self.clocks.setdefault(worker, clocks)

    def look(self, workers: Collection[int]) -> bool:
        """Go on where all of `workers` have reported; return whether the next layout counts."""
        if self.borders is None and all(worker in self.clocks for worker in workers):
            self.borders = {name: self._border(name, mode) for name, mode in self.modes.items()}
            self.borders = {name: border for name, border in self.borders.items() if border}
        return self.borders is not None and self.ready >= set(range(self.servers()))

    def _border(self, table: str, mode: str) -> dict[int, int]:
        own = {worker: clocks[table] for worker, clocks in self.clocks.items() if table in clocks}
        if mode == SYNC:
            return dict.fromkeys(own, max(own.values(), default=0))
        return own

    def moves_of(self, server: int) -> list[Move]:
        """Return what a server has to send and to take."""
        every = moves(self.old_layout, self.layout)
        return [move for move in every if server in (move.source, move.target)]

    def describe(self) -> dict[str, Any]:
        """Return what all members hear of it."""
        borders: dict[str, list[tuple[int, int]]] | None = None
        if self.borders is not None:  # The keys of a message are strings.
            borders = {name: sorted(border.items()) for name, border in self.borders.items()}
        return {
            "identity": self.identity, "old_servers": self.old_layout.num_servers,
            "servers": self.layout.num_servers, "borders": borders,
        }  # fmt: skip
