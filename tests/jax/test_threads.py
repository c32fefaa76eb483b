"""Ranks that are threads of one process have programs of their own, as most tests have ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest

import hvdlite.jax as hvd
from hvdlite.common.api.options import CallOptions
from hvdlite.common.runtime.process_sets import global_process_set
from hvdlite.jax.native.executions import _Execution, _Executions
from tests.ranks import run_ranks


def steps(rank: int, count: int = 3) -> list[np.ndarray]:
    """What a program gives each time, whose collectives have the same names on all ranks."""

    @jax.jit
    def step(value: Any) -> Any:
        total = hvd.allreduce(value, op=hvd.Sum)
        return hvd.allgather(total[None] * (hvd.rank() + 1), name="rows")

    return [np.asarray(step(np.float32(rank + 10 * number))) for number in range(count)]


@pytest.mark.parametrize("size", [2, 3, 2])
def test_each_thread_is_a_rank_of_its_own_job(size: int) -> None:
    for found in run_ranks(size, steps):
        for number, rows in enumerate(found):
            total = sum(rank + 10 * number for rank in range(size))
            np.testing.assert_array_equal(rows, [total * (rank + 1) for rank in range(size)])


def test_what_is_in_flight_on_one_rank_does_not_hold_up_another() -> None:
    """Rank 0 starts both programs at once, and rank 1 the second only when it has the first."""

    def main(rank: int) -> list[float]:
        step = jax.jit(lambda value: hvd.allreduce(value, name="x", op=hvd.Sum))
        first = step(np.float32(rank + 1))
        if rank:
            first.block_until_ready()
        return [float(first), float(step(np.float32(10)))]

    assert run_ranks(2, main) == [[3, 20]] * 2


@pytest.mark.parametrize(("by_place", "wanted"), [(True, []), (False, ["second"])])
def test_what_is_named_by_its_place_overtakes_nothing(by_place: bool, wanted: list[str]) -> None:
    """The first waits for one of its name, which is in flight still."""
    options = CallOptions(global_process_set, by_place=by_place)
    executions = _Executions(Mock())
    made = [
        _Execution(SimpleNamespace(names=[name], owner=None, options=options), [], 0)  # type: ignore[arg-type]
        for name in ("first", "first", "second")
    ]
    in_flight, *executions._waiting = made
    executions._names.update(in_flight.keys)
    assert [each.registered.names[0] for each in executions._free()] == wanted
    executions._names.clear()
    left = [each.registered.names[0] for each in executions._free()]
    assert [*wanted, *left] == (["first", "second"] if by_place else ["second", "first"])
