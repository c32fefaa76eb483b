"""The optional import of matplotlib, how pictures are named, and how sizes are written."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any


def load_matplotlib(extra: str) -> tuple[Any, Any]:
    """Return matplotlib's classes `Figure` and `Patch`.

    Raises `ImportError` without matplotlib; the message names the `extra` of hvdlite to install.
    """
    try:
        figure = import_module("matplotlib.figure")
        patches = import_module("matplotlib.patches")
    except ImportError:
        raise ImportError(f"drawing needs matplotlib: pip install 'hvdlite[{extra}]'") from None
    return figure.Figure, patches.Patch


def check_suffix(output: str) -> None:
    """Raise `ValueError` unless the suffix of `output` is one of a picture."""
    if Path(output).suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{output}: a picture is named .png, .svg or .pdf")


def size(nbytes: float) -> str:
    """Return `nbytes` in KiB or MiB."""
    return f"{nbytes / 2**10:.1f} KiB" if nbytes < 2**20 else f"{nbytes / 2**20:.1f} MiB"
