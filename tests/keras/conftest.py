"""What all tests of hvdlite.keras share."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before the import: no notes about the CPU


def pytest_collect_file() -> None:
    """Before any file of tests is read."""
    pytest.importorskip("keras", reason="the extra 'tensorflow' is not installed")
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    pytest.importorskip(backend, reason=f"the extra '{backend}' is not installed")
