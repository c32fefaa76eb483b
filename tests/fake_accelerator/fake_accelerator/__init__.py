"""A plug-in for hvdlite: the library of an accelerator that does not exist."""

from __future__ import annotations

from fake_accelerator.library import FakeLibrary

__all__ = ["FakeLibrary", "library"]


def library() -> FakeLibrary:
    """Return the library: what the entry point in pyproject.toml names."""
    return FakeLibrary()
