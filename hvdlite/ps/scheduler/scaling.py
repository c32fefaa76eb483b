"""Servers come and go while workers train: the decisions of the scheduler.

A change is a barrier. It begins only when every member is there, is in the present layout, and has
all tables of which it is to have something: a worker that comes again has declared those in which
it took part, and a server that comes again has begun its own. Then

1. all workers hold their pushes back, and say which step of each table each would push next;
2. all servers say which steps they have. Some may have a step more than others, and than a worker
   that was lost meanwhile and is to make it again;
3. the border of a worker is the highest of its steps, and in sync that of all workers. Who is
   behind goes on up to its border. So all servers have the same pushes, each of them once. In ssp
   nobody waits on the way there: it makes steps again that some servers have, whose pulls they had
   answered before, and no clock goes back;
4. every server that stands at the border sends what others keep in the next layout to them. Those
   write it down, and say that they are ready;
5. when all are ready, the next layout counts, as soon as the scheduler has written that down.

The old tables stay as they are until then, and whoever is lost, comes, leaves or is silent gives
the change up: all go on in the present layout. A loss after that is the return of any member.

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
    members: Mapping[Any, Any]  # Who takes part; another roll gives the change up.
    clocks: dict[int, Mapping[str, int]] = field(default_factory=dict)  # Of workers that hold back.
    # Of servers: table -> its version, and the finished steps of each worker.
    stands: dict[int, Mapping[str, tuple[int, Mapping[int, int]]]] = field(default_factory=dict)
    is_quiet: bool = False  # No push is under way.
    ready: set[int] = field(default_factory=set)  # Servers that have what they need.
    borders: dict[str, dict[int, int]] | None = None  # Table -> worker -> its first step after it.

    def servers(self) -> int:
        """Return how many servers take part: those of both layouts."""
        return max(self.layout.num_servers, self.old_layout.num_servers)

    def report(self, worker: int, clocks: Mapping[str, int]) -> None:
        """Take note that a worker holds its pushes back, and of the next step of each table."""
        if not self.is_quiet:
            self.clocks[worker] = clocks

    def stand(self, server: int, tables: Mapping[str, tuple[int, Mapping[int, int]]]) -> None:
        """Take note of what a server of the old layout has while no push is under way."""
        if self.is_quiet and self.borders is None:
            self.stands[server] = tables

    def look(self, workers: Collection[int]) -> bool:
        """Go on where all have reported; return whether the next layout can count."""
        self.is_quiet = self.is_quiet or self.clocks.keys() >= set(workers)
        old = range(self.old_layout.num_servers)
        if self.is_quiet and self.borders is None and self.stands.keys() >= set(old):
            self.borders = {name: self._border(name, mode) for name, mode in self.modes.items()}
            self.borders = {name: border for name, border in self.borders.items() if border}
        return self.borders is not None and self.ready >= set(range(self.servers()))

    def _border(self, table: str, mode: str) -> dict[int, int]:
        own = {worker: clocks[table] for worker, clocks in self.clocks.items() if table in clocks}
        version = 0
        for stands in self.stands.values():
            of_server, finished = stands.get(table, (0, {}))
            version = max(version, of_server)
            own = {worker: max(step, finished.get(worker, 0)) for worker, step in own.items()}
        # Elsewhere a worker may have made all its steps: none is asked for without need.
        return dict.fromkeys(own, max([*own.values(), version])) if mode == SYNC else own

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
            "servers": self.layout.num_servers, "is_quiet": self.is_quiet, "borders": borders,
        }  # fmt: skip
