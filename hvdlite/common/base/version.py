"""The version of hvdlite that is installed, for messages about versions that differ."""

from __future__ import annotations

from functools import cache


@cache
def installed_version() -> str:
    """Return the version of hvdlite, or "unknown" in a checkout that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("hvdlite")
    except PackageNotFoundError:
        return "unknown"
