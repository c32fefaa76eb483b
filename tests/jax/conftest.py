"""What all tests of the JAX adapter share."""

from __future__ import annotations

import pickle

import pytest

from tests.distribution import once
from tests.jax.cases import Outcomes, run_cases


def pytest_collect_file() -> None:
    """Before any file of tests is read."""
    pytest.importorskip("jax", reason="the extra 'jax' is not installed")
    pytest.importorskip("optax", reason="the extra 'jax' is not installed")


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What came of all cases on each rank of one job."""
    found: Outcomes = pickle.loads(once(tmp_path_factory, "jax", run_cases).read_bytes())
    return found
