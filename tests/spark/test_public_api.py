"""The public names of hvdlite.spark."""

from __future__ import annotations

import importlib

from tests.test_public_api import SPARK_FILE, golden, signatures


def test_spark() -> None:
    assert signatures(importlib.import_module("hvdlite.spark")) == golden(SPARK_FILE)
