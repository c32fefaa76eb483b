"""A tensor that ranks save and load in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import hvdlite.numpy as hvd
from tests.ranks import run_ranks

Layout = hvd.checkpoint.Layout
FULL = np.arange(24 * 24, dtype=np.float32).reshape(24, 24)


def cut(tensor: Any, layout: Any, rank: int) -> Any:
    """The part of a tensor that a rank holds, as numpy's own split gives it."""
    axes = list(np.ndindex(*layout.device_matrix))[rank]
    for dimension, axis in enumerate(layout.tensor_map):
        if axis != -1:
            count = layout.device_matrix[-1 - axis]
            tensor = np.array_split(tensor, count, axis=dimension)[axes[-1 - axis]]
    return np.array(tensor, order="C")


def save(folder: Path, tensor: Any, layout: Any, **values: Any) -> None:
    """Save a tensor on as many ranks as the layout has."""

    def main(rank: int) -> None:
        state = {"w": cut(tensor, layout, rank), **values}
        hvd.checkpoint.save(folder, state, {"w": layout})

    run_ranks(layout.ranks, main)


def load(folder: Path, like: Any, layout: Any, **options: Any) -> list[Any]:
    """Load it on as many ranks as the layout has; the parts that these got."""

    def main(rank: int) -> Any:
        state = {"w": np.zeros_like(cut(like, layout, rank))}
        assert hvd.checkpoint.load(folder, state, {"w": layout}, **options) is state
        return state["w"]

    return run_ranks(layout.ranks, main)


LAYOUTS = [
    Layout([1], [-1, -1]),
    Layout([2], [0, -1]),
    Layout([3], [-1, 0]),
    Layout([2, 2], [1, 0]),
    Layout([2, 2], [0, -1]),
    Layout([2, 4], [1, 0]),
]


def sorted_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))
