"""Lets tests import the plug-in of the fake accelerator, a package of its own.

It has the compiled stand-in for NCCL too.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.common.devices.nccl.conftest import fake, fake_path

__all__ = ["fake", "fake_path"]

sys.path.insert(0, str(Path(__file__).parents[2] / "fake_accelerator"))
