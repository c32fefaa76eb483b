"""What all tests of hvdlite.keras share."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before the import: no notes about the CPU
if os.environ.get("KERAS_BACKEND") == "jax":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Quickly compiled code does for small arrays.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    # A program keeps a thread of XLA until it ends, and all ranks of a test have programs in one
    # process: XLA takes this for the number of cores, and has as many threads.
    os.environ.setdefault("NPROC", "16")


def pytest_collect_file() -> None:
    """Before any file of tests is read."""
    pytest.importorskip("keras", reason="the extra 'tensorflow' is not installed")
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    for needed in ("jax", "optax") if backend == "jax" else (backend,):
        pytest.importorskip(needed, reason=f"the extra '{backend}' is not installed")
