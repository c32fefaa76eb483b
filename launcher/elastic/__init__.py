"""Elastic jobs: workers come and go, and the others train on."""

from __future__ import annotations

import importlib
from typing import Any

from hvdlite.as_horovod import RUNNER_PARTS


def __getattr__(name: str) -> Any:
    """Return the module that answers for one of Horovod, whose scripts import it from here."""
    if name in RUNNER_PARTS:
        return importlib.import_module(f"{__name__}.{RUNNER_PARTS[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
