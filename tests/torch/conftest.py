"""What all tests of the PyTorch adapter share."""

from __future__ import annotations

import pytest


def pytest_collect_file() -> None:
    """Before any file of tests is read."""
    torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")
    torch.set_num_threads(1)  # the ranks are threads already
