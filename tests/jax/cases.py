"""Cases that three ranks of one job run, one after the other: what came of each is compared later.

Ranks are processes, because a compiled program is of its process. All files of this folder have
their cases in the same job, and those of a file in few programs: to start processes and to compile
is what costs.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import hvdlite

RANKS = 3
Case = Callable[[int], Any]  # From the rank.
MODULES = (
    "test_collectives", "test_training", "test_sharded_state", "test_elastic", "test_errors",
)  # fmt: skip
# Quickly compiled code does for small arrays.
ENV = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}


class Outcome(NamedTuple):
    """What came of a case on a rank: a value, or the class and the text of an exception."""

    value: Any = None
    error: str = ""
    text: str = ""


Outcomes = Sequence[dict[str, Outcome]]  # By the rank, and the name of the case.


def run_cases(folder: Path) -> Path:
    """Run the cases of all files, and return a file with what came of them."""
    found: Outcomes = hvdlite.run(_run, (folder,), np=RANKS, env={**os.environ, **ENV})
    file = folder / "outcomes"
    file.write_bytes(pickle.dumps(found))
    return file


def _run(folder: Path) -> dict[str, Outcome]:
    import jax

    import hvdlite.jax as hvd

    hvd.init()
    outcomes = {}
    for module in MODULES:
        cases: dict[str, Case] = import_module(f"tests.jax.{module}").cases(folder)
        for name, case in cases.items():
            assert name not in outcomes, f"two cases are called {name}"
            try:
                value = jax.tree_util.tree_map(np.asarray, case(hvd.rank()))
                outcomes[name] = Outcome(value)
            except Exception as error:
                outcomes[name] = Outcome(None, type(error).__name__, str(error))
            hvd.barrier()
    return outcomes


def values(outcomes: Outcomes, name: str) -> list[Any]:
    """What a case has come to on each rank."""
    for rank, outcome in enumerate(outcomes):
        found = outcome[name]
        assert not found.error, f"rank {rank}: {found.error}: {found.text}"
    return [outcome[name].value for outcome in outcomes]


def same(found: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    """Compare two structures of arrays."""
    import jax

    leaves, structure = jax.tree_util.tree_flatten(found)
    others, other = jax.tree_util.tree_flatten(wanted)
    assert structure == other
    for one, two in zip(leaves, others, strict=True):
        assert np.shape(one) == np.shape(two)
        as_complex = np.asarray(one).astype(np.complex128), np.asarray(two).astype(np.complex128)
        np.testing.assert_allclose(*as_complex, rtol=tolerance, atol=tolerance)
