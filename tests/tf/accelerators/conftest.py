"""The compiled stand-in for NCCL and the CUDA runtime."""

from __future__ import annotations

from tests.common.devices.nccl.conftest import fake, fake_path

__all__ = ["fake", "fake_path"]
