"""hvdlite-run: starts one process per rank, watches them, and ends them together."""

from __future__ import annotations

from typing import Any

__all__ = ["RemoteError", "run"]


def __getattr__(name: str) -> Any:
    """Load `run` when it is asked for: the command line does not need it."""
    if name in __all__:
        from hvdlite.launcher import function

        return getattr(function, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
