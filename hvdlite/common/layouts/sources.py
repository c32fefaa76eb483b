"""Which ranks' parts of a tensor make up a part of it under another layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from hvdlite.common.layouts.layout import Box, Layout
from hvdlite.common.layouts.transfer import common_shape, intersection, volume


@lru_cache(maxsize=1 << 12)
def writers(layout: Layout, shape: tuple[int, ...]) -> dict[int, Box]:
    """Return the parts that make up a tensor, each by the lowest rank that holds it.

    Empty parts are left out; a tensor without elements is one part, of rank 0.
    """
    parts: dict[Box, int] = {}
    for rank in range(layout.ranks):
        parts.setdefault(layout.box(shape, rank), rank)
    found = {rank: box for box, rank in parts.items() if volume(box)}
    return found or {0: layout.box(shape, 0)}


def pieces(held: Layout, shape: Sequence[int], wanted: Box) -> list[tuple[int, Box]]:
    """Return the ranks whose parts make up the part `wanted`, each with what is in common.

    Of ranks that hold the same part the lowest is taken.
    """
    overlaps = [
        (rank, intersection(box, wanted)) for rank, box in writers(held, tuple(shape)).items()
    ]
    return [(rank, box) for rank, box in overlaps if box is not None]


def ranks_needed(
    held: Layout, wanted: Layout, rank: int, shape: Sequence[int] | None = None
) -> list[int]:
    """Return the ranks under `held` whose parts `rank` needs under `wanted`, in rising order.

    `shape` is needed where one of the layouts is uneven: `ValueError` without it.
    """
    if shape is None:
        if held.uneven or wanted.uneven:
            raise ValueError(f"{held} to {wanted}: an uneven layout needs the tensor's shape")
        if len(held.tensor_map) != len(wanted.tensor_map):
            raise ValueError(f"{held} and {wanted} are for different numbers of dimensions")
        shape = common_shape(held, wanted)
    return sorted(source for source, _ in pieces(held, shape, wanted.box(shape, rank)))
