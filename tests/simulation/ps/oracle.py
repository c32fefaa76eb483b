"""What numpy makes of all steps of a job of the parameter server."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from hvdlite.checkpoint import manifest
from hvdlite.ps.layouts.blocks import Array, TensorSpec
from hvdlite.ps.server import saved_files
from hvdlite.ps.server.checkpoints import VALUE
from hvdlite.ps.tables.clocks import SYNC
from hvdlite.ps.tables.description import TableDescription
from hvdlite.ps.tables.row_store import ZEROS, RowsSpec, RowStore
from hvdlite.ps.tables.row_table import AddedRows
from hvdlite.ps.tables.updater import Added, Updater
from tests.ps.test_tables import Momentum
from tests.simulation.ps.programs import PsProgram

ROWS = RowsSpec(5, 2, "float64", initializer=ZEROS)
ALL_ROWS = TensorSpec("r", "float64", (5, 2))
SPECS = [TensorSpec("a", "float64", (7,)), TensorSpec("b", "float64", (3, 2))]


@lru_cache(maxsize=256)
def gradients_of(step: int, worker: int) -> list[Array]:
    """Return whole numbers, which add up to the same in all orders."""
    made = np.random.default_rng([step, worker])
    arrays = [made.integers(1, 1 << 40, spec.size).astype(np.float64) for spec in SPECS]
    for array in arrays:
        array.flags.writeable = False  # They are asked for again.
    return arrays


@lru_cache(maxsize=256)
def rows_of(step: int, worker: int) -> tuple[Array, Array]:
    """Return the ids of some rows, and whole numbers for each of them."""
    made = np.random.default_rng([step, worker, 1])
    ids = made.choice(ROWS.count, made.integers(1, ROWS.count), replace=False)
    return ids, made.integers(1, 1 << 40, (len(ids), ROWS.length)).astype(np.float64)


@lru_cache(maxsize=256)
def ids_of(step: int, worker: int) -> Array:
    """Return the ids of the rows that a step begins with, not those that it changes."""
    made = np.random.default_rng([step, worker, 2])
    return made.choice(ROWS.count, made.integers(0, ROWS.count), replace=False)


def whole_rows(step: int, worker: int) -> Array:
    """Return the same, and zeros for the other rows."""
    ids, values = rows_of(step, worker)
    whole = np.zeros(ALL_ROWS.shape)
    whole[ids] = values
    return whole


def first_values() -> list[Array]:
    return [np.arange(spec.size, dtype=np.float64) for spec in SPECS]


def loaded(folder: Path, table: str) -> tuple[list[Array], int]:
    """Return the values of a table of a checkpoint, and its steps, whichever servers saved it."""
    dense, rows = [np.full(spec.size, np.nan) for spec in SPECS], np.zeros(ALL_ROWS.shape)
    for file in folder.glob(f"*{saved_files.SUFFIX}"):
        saved = saved_files.read(file)
        if saved.described.rows is not None:
            ids, values = saved.saved.values
            rows[ids] = values
            continue
        for block, array in zip(saved.described.blocks, saved.saved.values, strict=True):
            block.scatter(array, dense, saved.described.first_key)
    about = manifest.read(folder / manifest.MANIFEST).values[VALUE]
    return [rows] if table == ALL_ROWS.name else dense, about["tables"][table]["steps"]


class Oracle:
    """What numpy makes of all steps, in one process."""

    def __init__(self, program: PsProgram) -> None:
        self._program = program
        if program.follows is None:
            self.updater = new_dense_updater(program)
            self.updater.begin(first_values())
            self.versions = [_copy(self.updater.values())]  # In sync, by the number of steps.
        else:
            before = Oracle(program.follows)
            self.updater, self.versions = before.updater, before.versions
        for step in range(program.loaded, program.steps):
            terms = [gradients_of(step, worker) for worker in range(program.workers)]
            if program.mode == SYNC:
                scale = 1 / program.workers
                terms = [[sum(each) * scale for each in zip(*terms, strict=True)]]
            for term in terms:
                self.updater.step(term, [])
            self.versions.append(_copy(self.updater.values()))

    @cached_property
    def rows(self) -> list[Array]:
        """By the number of steps, as `versions`."""
        program = self._program
        rows = Oracle(program.follows).rows if program.follows else [np.zeros(ALL_ROWS.shape)]
        scale = 1 / program.workers if program.mode == SYNC else 1.0
        for step in range(program.loaded, program.steps):
            total = np.zeros(ALL_ROWS.shape)
            for worker in range(program.workers):
                total += whole_rows(step, worker)
            rows.append(rows[-1] + total * scale)
        return rows


def new_updater(program: PsProgram, described: TableDescription) -> Updater:
    """Return what runs on servers: with a state, or one that does not mind the order."""
    if described.rows is not None:
        return AddedRows(RowStore(described.name, described.rows.spec))
    return new_dense_updater(program)


def new_dense_updater(program: PsProgram) -> Updater:
    return Momentum() if program.momentum and program.mode == SYNC else Added()


def _copy(values: Sequence[Array]) -> list[Array]:
    return [array.copy() for array in values]
