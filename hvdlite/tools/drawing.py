"""What pictures are drawn with, where it is installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load_matplotlib(extra: str) -> tuple[Any, Any]:
    """The classes of matplotlib's figures and patches.

    Raises `ImportError` without it, which names the `extra` of hvdlite that brings it.
    """
    try:
        figure = import_module("matplotlib.figure")
        patches = import_module("matplotlib.patches")
    except ImportError:
        raise ImportError(f"drawing needs matplotlib: pip install 'hvdlite[{extra}]'") from None
    return figure.Figure, patches.Patch
