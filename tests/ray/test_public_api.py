"""The public names of hvdlite.ray."""

from __future__ import annotations

import importlib

import pytest

from tests.test_public_api import RAY_FILE, golden, signatures


def test_ray() -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    assert signatures(importlib.import_module("hvdlite.ray")) == golden(RAY_FILE)
