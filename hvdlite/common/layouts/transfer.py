"""How many bytes a rank must receive when a tensor goes from one layout to another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from hvdlite.common.layouts.layout import Box, Layout


def intersection(first: Box, second: Box) -> Box | None:
    """Return what two parts of a tensor have in common; None where that is nothing."""
    common = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(first, second, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def volume(box: Box | None) -> int:
    """Return the number of elements of a part."""
    return 0 if box is None else math.prod(stop - start for start, stop in box)


def bytes_to_receive(
    held: Layout, wanted: Layout, shape: Sequence[int], bytes_per_element: int
) -> int:
    """Return the most bytes that any rank lacks of its part in `wanted`, while it holds `held`.

    Raises `ValueError` if the layouts have different numbers of ranks, or do not fit the shape.
    """
    if held.ranks != wanted.ranks:
        raise ValueError(f"{held} has {held.ranks} ranks, {wanted} has {wanted.ranks}")
    if len(held.tensor_map) != len(wanted.tensor_map):
        raise ValueError(f"{held} and {wanted} are for different numbers of dimensions")
    held.check_shape(shape)
    wanted.check_shape(shape)
    if held.uneven or wanted.uneven:
        return _most_missing(held, wanted, tuple(shape)) * bytes_per_element
    # Where all parts are equal, the share of a tensor that is missing does not depend on its shape.
    missing, elements = _missing_share(held, wanted)
    return math.prod(shape) * missing // elements * bytes_per_element


@lru_cache(maxsize=1 << 16)
def _missing_share(held: Layout, wanted: Layout) -> tuple[int, int]:
    """Return the elements that a rank lacks of a small tensor, and how many that tensor has."""
    shape = common_shape(held, wanted)
    return _most_missing(held, wanted, shape), math.prod(shape)


def common_shape(first: Layout, second: Layout) -> tuple[int, ...]:
    """Return the smallest shape that divides into the parts of both layouts."""
    return tuple(math.lcm(a, b) for a, b in zip(first.cuts, second.cuts, strict=True))


def _most_missing(held: Layout, wanted: Layout, shape: tuple[int, ...]) -> int:
    most = 0
    for rank in range(wanted.ranks):
        box = wanted.box(shape, rank)
        most = max(most, volume(box) - volume(intersection(box, held.box(shape, rank))))
    return most


def allreduce_bytes(total_bytes: int, ranks: int) -> int:
    """Return what a rank receives while partial sums become the sum."""
    return 2 * total_bytes * (ranks - 1) // ranks


# Which ranks' parts of a tensor make up a part of it under another layout.


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
