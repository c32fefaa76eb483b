"""What all tests of the PyTorch adapter share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_collect_file() -> None:
    """Before any file of tests is read."""
    torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")
    torch.set_num_threads(1)  # the ranks are threads already


@pytest.fixture
def float64() -> Iterator[None]:
    """Let tensors have 64 bits, and the same random values in each test."""
    import torch

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
