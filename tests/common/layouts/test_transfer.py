"""Bytes that ranks receive between layouts, and the source files that they need."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hvdlite.common.layouts.layout import Layout, from_cuts, whole
from hvdlite.common.layouts.transfer import (
    allreduce_bytes,
    bytes_to_receive,
    pieces,
    ranks_needed,
)

SHAPE = (64, 64)


@pytest.mark.parametrize(
    ("held", "wanted", "expected"),
    [
        *(((1, 1), cuts, 0) for cuts in [(8, 1), (1, 8), (2, 4)]),
        ((8, 1), (1, 1), 14336),
        ((8, 1), (1, 8), 1792),
        ((2, 4), (4, 2), 2048),
        ((2, 4), (8, 1), 1536),
        ((2, 4), (2, 1), 6144),
        ((2, 4), (1, 1), 14336),
        ((2, 4), (1, 8), 2048),
        ((8, 1), (2, 4), 1536),
        ((8, 1), (4, 2), 1024),
        ((2, 1), (1, 8), 1024),
        *(((2, 1), cuts, 0) for cuts in [(2, 4), (4, 2), (8, 1)]),
    ],
)
def test_bytes_of_64_by_64_float32_among_8_ranks(
    held: tuple[int, int], wanted: tuple[int, int], expected: int
) -> None:
    assert bytes_to_receive(from_cuts(held, 8), from_cuts(wanted, 8), SHAPE, 4) == expected


def test_bytes_are_those_that_arrays_lack() -> None:
    """The oracle marks what each rank holds, and counts what it lacks."""
    maps = [(a, b) for a, b in itertools.product(range(-1, 3), repeat=2) if a != b or a == -1]
    layouts = [Layout([2, 3, 2], each, uneven) for each in maps for uneven in (False, True)]
    shape = (12, 24)
    for held, wanted in itertools.product(layouts, layouts):
        most = 0
        for rank in range(12):
            lacking = np.zeros(shape, bool)
            lacking[tuple(slice(*each) for each in wanted.box(shape, rank))] = True
            lacking[tuple(slice(*each) for each in held.box(shape, rank))] = False
            most = max(most, int(lacking.sum()))
        assert bytes_to_receive(held, wanted, shape, 4) == 4 * most


def test_bytes_of_an_allreduce() -> None:
    assert allreduce_bytes(8192, 4) == 12288


def test_layouts_of_different_jobs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has 8 ranks, .* has 4"):
        bytes_to_receive(whole(2, 8), whole(2, 4), SHAPE, 4)
    with pytest.raises(ValueError, match="different numbers of dimensions"):
        bytes_to_receive(whole(2, 8), whole(1, 8), SHAPE, 4)


FILES: dict[str, tuple[Layout, Layout, list[list[int]]]] = {
    "fewer rows": (Layout([4], [0, -1]), Layout([2], [0, -1]), [[0, 1], [2, 3]]),
    "rows to columns": (Layout([4], [0, -1]), Layout([2], [-1, 0]), [[0, 1, 2, 3]] * 2),
    "blocks to rows": (
        Layout([2, 2], [1, 0]), Layout([4], [0, -1]), [[0, 1], [0, 1], [2, 3], [2, 3]]
    ),
    "blocks to columns": (
        Layout([2, 4], [1, 0]), Layout([4], [-1, 0]), [[0, 4], [1, 5], [2, 6], [3, 7]]
    ),
    "8 to 3": (Layout([8], [0, -1]), Layout([3], [0, -1]), [[0, 1, 2], [2, 3, 4, 5], [5, 6, 7]]),
    "copies": (Layout([2, 4], [1, -1]), Layout([2, 2], [1, 0]), [[0], [0], [4], [4]]),
}  # fmt: skip


@pytest.mark.parametrize("vector", FILES)
def test_files_that_each_new_rank_needs(vector: str) -> None:
    held, wanted, expected = FILES[vector]
    for shape in ((24, 24), None):
        assert [ranks_needed(held, wanted, r, shape) for r in range(wanted.ranks)] == expected


def test_pieces_make_up_exactly_the_part_that_is_wanted() -> None:
    tensor = np.arange(7 * 10).reshape(7, 10)
    held = Layout([2, 3, 2], [1, 0], uneven=True)
    for wanted in (Layout([5], [0, -1], uneven=True), Layout([2, 2], [0, 1], uneven=True)):
        for rank in range(wanted.ranks):
            box = wanted.box((7, 10), rank)
            seen = np.zeros_like(tensor)
            for source, piece in pieces(held, (7, 10), box):
                held_box = held.box((7, 10), source)
                assert all(
                    h[0] <= p[0] < p[1] <= h[1] for h, p in zip(held_box, piece, strict=True)
                )
                seen[tuple(slice(*each) for each in piece)] += 1
            expected = np.zeros_like(tensor)
            expected[tuple(slice(*each) for each in box)] = 1
            assert np.array_equal(seen, expected)


def test_an_uneven_layout_needs_the_shape() -> None:
    uneven = Layout([4], [0], uneven=True)
    assert ranks_needed(uneven, Layout([1], [-1]), 0, (5,)) == [0, 1, 2]
    with pytest.raises(ValueError, match="uneven layout needs the tensor's shape"):
        ranks_needed(uneven, Layout([1], [-1]), 0)
    with pytest.raises(ValueError, match="different numbers of dimensions"):
        ranks_needed(whole(1), whole(2), 0)
