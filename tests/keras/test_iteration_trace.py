"""The iterations of `fit` in the iteration trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hvdlite.keras as hvd
from hvdlite.common.iterations.rows import IterationRow, read_rows
from hvdlite.common.settings.config import Config
from hvdlite.keras.framework import keras
from tests.keras.training import BATCH, EAGERLY, ROWS, batches_of, make_model, sgd
from tests.ranks import run_ranks

STEPS = ROWS // BATCH
NBYTES = 4 * (4 * 5 + 5 + 5 * 2 + 2)


def fit(*callbacks: Any, **compiled: Any) -> None:
    model = make_model()
    model.compile(optimizer=hvd.DistributedOptimizer(sgd()), loss="mse", **compiled)
    given = {"callbacks": list(callbacks)} if callbacks else {}
    model.fit(**batches_of(0, 1), epochs=2, verbose=0, **given)


def check(rows: list[IterationRow], number: int = 2 * STEPS) -> None:
    assert [row.iteration for row in rows] == list(range(number))
    for row in rows:
        assert row.bp_end is not None and row.fp_end is row.optimizer_time is None
        assert row.fp_start < row.bp_end < row.iteration_end
        assert sum(each.bytes for each in row.segments) == NBYTES
        assert all(
            row.fp_start < each.start < each.end < row.iteration_end for each in row.segments
        )


def test_the_callback() -> None:
    def main(rank: int) -> None:
        with hvd.trace_iterations() as trace:
            fit(hvd.callbacks.IterationTraceCallback(trace))
            check(trace.rows())

    run_ranks(2, main)


def test_the_setting_needs_no_change_of_the_script(tmp_path: Path) -> None:
    path = str(tmp_path / "t.csv")

    def main(rank: int) -> None:
        fit()
        fit(keras.callbacks.TerminateOnNaN())

    run_ranks(2, main, config=Config(trace_iterations=path))
    for rank in range(2):
        check(read_rows(str(tmp_path / f"t.rank{rank}.csv")), 4 * STEPS)


def test_a_fit_that_raises_does_not_blind_the_trace() -> None:
    class Interrupt(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            raise ArithmeticError

    def main(rank: int) -> None:
        with hvd.trace_iterations() as trace:
            callback = hvd.callbacks.IterationTraceCallback(trace)
            with pytest.raises(ArithmeticError):
                fit(callback, Interrupt(), **EAGERLY)
            fit(callback, **EAGERLY)
            check(trace.rows())

    run_ranks(2, main)
