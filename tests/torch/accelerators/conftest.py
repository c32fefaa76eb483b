"""Lets tests import the plug-in of the fake accelerator, which is a package of its own."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "fake_accelerator"))
