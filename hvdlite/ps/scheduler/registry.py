"""The tables of a cluster, and the layout of all of them: the scheduler's second set of decisions.

The first worker that declares a table decides what it is; what others declare is compared with it.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.ps.layouts.blocks import TensorSpec, specs_of_words
from hvdlite.ps.layouts.layout import PART_BYTES, Layout, Part, place
from hvdlite.ps.tables.clocks import Mode


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

    def tables_of(self, *workers: int) -> set[str]:
        """Return the tables in which one of these workers takes part."""
        tables = self._tables.items()
        return {name for name, table in tables if not table.workers.isdisjoint(workers)}

    def forget(self, worker: int) -> None:
        for table in self._tables.values():
            table.workers.discard(worker)

    def immovable(self) -> str:
        """Return a table whose tensors are whole, which cannot move; empty: all can.

        Its updater keeps a state for each tensor, which is not known by its elements.
        """
        tables = self._tables.items()
        return next((name for name, table in tables if table.options.part_bytes is None), "")

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


def is_change_awaited(news: Mapping[str, Any]) -> bool:
    """Return whether a change of servers, by the scheduler's news, waits until all have tables."""
    return bool(news.get("wanted", 0) != news.get("layout_servers", 0))
