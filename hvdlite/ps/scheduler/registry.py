"""The tables of a cluster, and the layout of all of them: the scheduler's second set of decisions.

The first worker that declares a table decides what it is; what others declare is compared with it.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.ps.layouts.blocks import TensorSpec, specs_of_words
from hvdlite.ps.layouts.layout import PART_BYTES, Layout, Part, place
from hvdlite.ps.tables.clocks import SYNC, Mode


class TableOptions(NamedTuple):
    """What workers must say alike of a table, besides its tensors."""

    mode: str
    staleness: int | None = None
    average: bool = True
    part_bytes: int | None = PART_BYTES  # None: tensors are kept whole.
    rows: Sequence[Any] | None = None  # Of a table of rows: what they are.
    scale: str | None = None  # Of async and ssp: what each push is multiplied by.

    @classmethod
    def of(
        cls, mode: str, staleness: int | None, op: int, scale: str | None = None,
        partition: str = "element",
    ) -> TableOptions:  # fmt: skip
        """Return what the arguments of users ask for. Raises ValueError where they do not fit."""
        Mode(mode, staleness, scale)
        if partition not in ("element", "tensor"):
            raise ValueError(f"partition is {partition!r}, which is neither 'element' nor 'tensor'")
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ValueError(f"op is {op!r}: a server averages what is pushed, or adds it up")
        part_bytes = PART_BYTES if partition == "element" else None
        return cls(mode, staleness, op == ReduceOp.AVERAGE, part_bytes, scale=scale)

    @property
    def clock_mode(self) -> Mode:
        """What clocks have to know. Raises ValueError where the fields do not fit."""
        return Mode(self.mode, self.staleness, self.scale)


class _Table(NamedTuple):
    first_key: int
    specs: tuple[TensorSpec, ...]
    options: TableOptions
    declared_by: int
    workers: set[int]  # Who has declared it, and has not left.


class Registry:
    """The tables that were declared, and where their parts are."""

    def __init__(self, num_servers: int) -> None:
        self.layout = Layout((), (), num_servers)
        self.version = 1  # Of the layout: another number of servers makes another one.
        self.reached: dict[str, int] = {}  # The versions of tables that servers have told of.
        self.loaded: dict[str, int] = {}  # Tables -> the turns of their last loads.
        self._tables: dict[str, _Table] = {}

    def reach(self, name: str, version: int) -> bool:
        """Take note that a table has a version; return whether it is its first update."""
        before = self.reached.get(name, 0)
        self.reached[name] = max(before, version)
        return before < 1 <= version

    def declare(
        self, worker: int, name: str, specs: Sequence[TensorSpec], options: TableOptions
    ) -> tuple[int, list[Part]]:
        """Return the key of the first tensor of a table, and the parts of the table.

        Raises ValueError where another worker has declared something else.
        """
        known = self._tables.get(name)
        if known is not None:
            self._compare(worker, name, known, specs, options)
        else:
            known = _Table(len(self.layout.itemsizes), tuple(specs), options, worker, set())
            if options.rows is not None:
                specs = []  # Row r is on server r mod S.
            sizes, itemsizes = [spec.size for spec in specs], [spec.itemsize for spec in specs]
            servers = self.layout.num_servers
            self.layout = place(sizes, itemsizes, servers, options.part_bytes, self.layout)
            self._tables[name] = known
        known.workers.add(worker)
        count = len(known.specs) if known.options.rows is None else 0
        keys = range(known.first_key, known.first_key + count)
        return known.first_key, [part for part in self.layout.parts if part.key in keys]

    def first_of(self, name: str) -> int:
        """Return the worker that has declared a table first."""
        return self._tables[name].declared_by

    def modes(self) -> dict[str, str]:
        return {name: table.options.mode for name, table in self._tables.items()}

    def takes_part(self, worker: int, name: str) -> bool:
        """Return whether a worker takes part in a table."""
        return name in self._tables and worker in self._tables[name].workers

    def tables_of(self, worker: int) -> set[str]:
        """Return the tables in which a worker takes part."""
        return {name for name, table in self._tables.items() if worker in table.workers}

    def forget(self, worker: int) -> None:
        for table in self._tables.values():
            table.workers.discard(worker)

    def immovable(self) -> str:
        """Return a table whose tensors are whole, which cannot move; empty: all can.

        Its updater keeps a state for each tensor, which is not known by its elements.
        """
        tables = self._tables.items()
        return next((name for name, table in tables if table.options.part_bytes is None), "")

    def change_to(self, layout: Layout) -> None:
        """Let another layout count from now on."""
        self.layout = layout
        self.version += 1

    def _compare(
        self, worker: int, name: str, known: _Table, specs: Sequence[TensorSpec],
        options: TableOptions,
    ) -> None:  # fmt: skip
        first = known.declared_by

        def differ(what: str, there: object, here: object) -> ValueError:
            return ValueError(
                f"workers disagree on {what}: worker {first} has {there}, worker {worker} has "
                f"{here}. Build the same model and optimizer in all of them"
            )

        if len(specs) != len(known.specs):
            counts = len(known.specs), len(specs)
            raise differ(f"the number of tensors of the table '{name}'", *counts)
        for there, here in zip(known.specs, specs, strict=True):
            for key in TensorSpec._fields:
                values = getattr(there, key), getattr(here, key)
                if values[0] != values[1]:
                    raise differ(f"the {key} of '{there.name}' in the table '{name}'", *values)
        for key, mine, yours in zip(options._fields, known.options, options, strict=True):
            if mine != yours:
                raise differ(f"the {key} of the table '{name}'", mine, yours)

    def describe(self, name: str) -> dict[str, Any]:
        """Return the specs and options of a table; empty ones where nobody has declared it."""
        known = self._tables.get(name)
        if known is None:
            return {"specs": [], "options": []}
        return {"specs": known.specs, "options": list(known.options)}

    # -- a scheduler that comes again

    def state(self) -> dict[str, Any]:
        """Return what a scheduler has to keep, as JSON can hold it."""
        tables = [
            [
                name, table.first_key, table.declared_by, list(table.options),
                table.specs, sorted(table.workers),
            ]
            for name, table in self._tables.items()
        ]  # fmt: skip
        return {
            "tables": tables, "parts": self.layout.parts, "itemsizes": self.layout.itemsizes,
            "servers": self.layout.num_servers, "version": self.version, "reached": self.reached,
            "loaded": self.loaded,
        }  # fmt: skip

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` has returned."""
        for name, first_key, worker, options, specs, workers in state["tables"]:
            self._tables[name] = _Table(
                first_key, tuple(specs_of_words(specs)), TableOptions(*options), worker,
                set(workers),
            )  # fmt: skip
        self.layout = Layout.of(state["parts"], state["servers"], state["itemsizes"])
        self.version, self.reached = state["version"], state["reached"]
        self.loaded = state.get("loaded", {})


def is_change_awaited(news: Mapping[str, Any]) -> bool:
    """Return whether a change of servers, by the scheduler's news, waits until all have tables."""
    return bool(news.get("wanted", 0) != news.get("layout_servers", 0))


# Servers come and go while workers train: the decisions of the scheduler.
#
# A change is a barrier. It begins only when every member is there, is in the present layout, and
# has all tables of which it is to have something: a worker that comes again has declared those in
# which it took part, and a server that comes again has begun its own. Then
#
# 1. all workers hold their pushes back, and say which step of each table each would push next;
# 2. all servers say which steps they have. Some may have a step more than others, and than a worker
#    that was lost meanwhile and is to make it again;
# 3. the border of a worker is the highest of its steps, and in sync that of all workers. Who is
#    behind goes on up to its border. So all servers have the same pushes, each of them once. In ssp
#    nobody waits on the way there: it makes steps again that some servers have, whose pulls they
#    had answered before, and no clock goes back;
# 4. every server that stands at the border sends what others keep in the next layout to them. Those
#    write it down, and say that they are ready;
# 5. when all are ready, the next layout counts, as soon as the scheduler has written that down.
#
# The old tables stay as they are until then, and whoever is lost, comes, leaves or is silent gives
# the change up: all go on in the present layout. So does one that takes too long, for a while. A
# loss after that is the return of any member.
#
# This module never sends, sleeps or reads a clock.


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
        return self.is_ready()

    def is_ready(self) -> bool:
        servers = max(self.layout.num_servers, self.old_layout.num_servers)
        return self.borders is not None and self.ready >= set(range(servers))

    def behind(self) -> list[int]:
        """Return the workers that had steps to make before their borders, sorted."""
        steps = [
            (worker, step - self.clocks[worker][table])
            for table, border in (self.borders or {}).items()
            for worker, step in border.items()
        ]
        return sorted({worker for worker, missing in steps if missing > 0})

    def _border(self, table: str, mode: str) -> dict[int, int]:
        own = {worker: clocks[table] for worker, clocks in self.clocks.items() if table in clocks}
        version = 0
        for stands in self.stands.values():
            of_server, finished = stands.get(table, (0, {}))
            version = max(version, of_server)
            own = {worker: max(step, finished.get(worker, 0)) for worker, step in own.items()}
        # Elsewhere a worker may have made all its steps: none is asked for without need.
        return dict.fromkeys(own, max([*own.values(), version])) if mode == SYNC else own

    def describe(self) -> dict[str, Any]:
        """Return what all members hear of it."""
        borders: dict[str, list[tuple[int, int]]] | None = None
        if self.borders is not None:  # The keys of a message are strings.
            borders = {name: sorted(border.items()) for name, border in self.borders.items()}
        return {
            "identity": self.identity, "old_servers": self.old_layout.num_servers,
            "servers": self.layout.num_servers, "is_quiet": self.is_quiet, "borders": borders,
        }  # fmt: skip
