"""Layouts: which part each rank holds, beside an independent way to cut arrays."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.layouts.layout import (
    Box,
    Layout,
    from_cuts,
    from_placements,
    prime_factors,
    to_placements,
    whole,
)
from tests.ranks import run_ranks

ALL = (0, 4)


def rows(start: int, stop: int) -> Box:
    return ((start, stop), ALL)


def columns(start: int, stop: int) -> Box:
    return (ALL, (start, stop))


HALVES = [(0, 2), (2, 4)]
VECTORS: dict[str, tuple[list[int], list[int], tuple[int, int], list[Box]]] = {
    "rows first": ([2, 2], [1, 0], (2, 2), [(a, b) for a in HALVES for b in HALVES]),
    "columns first": ([2, 2], [0, 1], (2, 2), [(b, a) for a in HALVES for b in HALVES]),
    "rows, repeated": ([2, 2], [1, -1], (2, 1), [rows(0, 2)] * 2 + [rows(2, 4)] * 2),
    "columns": ([2, 2], [-1, 0], (1, 2), [columns(0, 2), columns(2, 4)] * 2),
    "one row each": ([4], [0, -1], (4, 1), [rows(i, i + 1) for i in range(4)]),
    "repeated columns": ([2, 4], [-1, 0], (1, 4), [columns(i, i + 1) for i in range(4)] * 2),
}


@pytest.mark.parametrize("vector", VECTORS)
def test_parts_of_a_4_by_4_tensor(vector: str) -> None:
    matrix, tensor_map, cuts, boxes = VECTORS[vector]
    layout = Layout(matrix, tensor_map)
    assert layout.cuts == cuts
    assert [layout.box((4, 4), rank) for rank in range(layout.ranks)] == boxes


def test_halves_of_rows_for_four_ranks_each() -> None:
    layout = Layout([2, 4], [1, -1])
    halves = [layout.box((32, 32), rank)[0] for rank in range(8)]
    assert halves == [(0, 16)] * 4 + [(16, 32)] * 4


@pytest.mark.parametrize("matrix", [[8], [2, 4], [4, 2], [2, 2, 2]])
def test_every_map_of_a_matrix_cuts_as_nested_splits_do(matrix: list[int]) -> None:
    """The oracle splits an array along one axis of the mesh after the other, as DTensor does."""
    tensor = np.arange(256).reshape(16, 16)
    axes = range(-1, len(matrix))
    for first, second in itertools.product(axes, axes):
        if first == second != -1:
            continue
        layout = Layout(matrix, [first, second])
        placements = to_placements(layout)
        again = from_placements(matrix, placements, 2)
        assert again == Layout(matrix, [first, second], uneven=True)
        for rank, place in enumerate(itertools.product(*map(range, matrix))):
            expected = tensor
            for count, index, dimension in zip(matrix, place, placements, strict=True):
                if dimension is not None:
                    expected = np.split(expected, count, axis=dimension)[index]
            assert np.array_equal(cut(tensor, layout.box((16, 16), rank)), expected)


def cut(tensor: Any, box: Box) -> Any:
    return tensor[tuple(slice(*interval) for interval in box)]


def test_a_dimension_that_is_cut_along_two_axes() -> None:
    in_order, reversed_order = Layout([2, 4], [(1, 0)]), Layout([2, 4], [(0, 1)])
    assert [in_order.box((8,), rank) for rank in range(8)] == [((i, i + 1),) for i in range(8)]
    starts = [reversed_order.box((8,), rank)[0][0] for rank in range(8)]
    assert starts == [0, 2, 4, 6, 1, 3, 5, 7]
    assert to_placements(in_order) == (0, 0)
    with pytest.raises(ValueError, match=r"dimension 0 is cut along axes .* order of the mesh"):
        to_placements(reversed_order)


@pytest.mark.parametrize(
    ("length", "parts", "expected"),
    [
        (7, 2, [(4, 0), (3, 4)]),
        (5, 4, [(2, 0), (2, 2), (1, 4), (0, 5)]),
        (10, 4, [(3, 0), (3, 3), (3, 6), (1, 9)]),
        (3, 4, [(1, 0), (1, 1), (1, 2), (0, 3)]),
        (13, 8, [*((2, i * 2) for i in range(6)), (1, 12), (0, 13)]),
    ],
)
def test_uneven_parts_are_those_of_dtensor(
    length: int, parts: int, expected: list[tuple[int, int]]
) -> None:
    layout = Layout([parts], [0], uneven=True)
    boxes = [layout.box((length,), rank)[0] for rank in range(parts)]
    assert [(stop - start, start) for start, stop in boxes] == expected


def test_uneven_parts_are_not_those_of_a_reducescatter() -> None:
    """Which gives the first ranks one row more; whoever mixes the two must cut anew."""
    rows = run_ranks(4, lambda rank: len(hvd.reducescatter(np.ones((5, 2)), name="rows")))
    boxes = [Layout([4], [0], uneven=True).box((5,), rank)[0] for rank in range(4)]
    assert rows == [2, 1, 1, 1] and [stop - start for start, stop in boxes] == [2, 2, 1, 0]


def test_repetition_is_on_the_right_for_operators_and_on_the_left_for_data() -> None:
    operator, data = from_cuts([1, 4], 8), from_cuts([1, 4], 8, "left")
    parts = [[layout.box((4, 4), r)[1][0] for r in range(8)] for layout in (operator, data)]
    assert parts == [[0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 3, 0, 1, 2, 3]]
    assert from_cuts([], 4).box((), 3) == ()
    assert from_cuts([1, 1], 4).is_whole
    assert whole(2, 4).box((3, 5), 2) == ((0, 3), (0, 5))


@pytest.mark.parametrize(
    ("matrix", "tensor_map", "text"),
    [
        ([], [-1], "positive numbers, at least one"),
        ([0, 2], [-1], "positive numbers"),
        ([2, 2.0], [-1], "positive numbers"),
        ([True, 2], [-1], "positive numbers"),
        ([2, 2], [2, -1], r"2 of the tensor map is not in -1..1"),
        ([2, 2], [-2, -1], r"-2 of the tensor map is not in -1..1"),
        ([2, 2], [(-1, 0), -1], r"-1 of the tensor map is not in -1..1"),
        ([2, 2], [1, 1], "two dimensions along one axis"),
        ([2, 2], [(0, 0)], "two dimensions along one axis"),
    ],
)
def test_refused_layouts(matrix: list[Any], tensor_map: list[Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Layout(matrix, tensor_map)


def test_refused_uses() -> None:
    layout = Layout([2, 4], [1, 0])
    with pytest.raises(ValueError, match=r"dimension 1 of the shape \(4, 6\) .* into 4 parts"):
        layout.box((4, 6), 0)
    with pytest.raises(ValueError, match=r"is for 2 dimensions; the shape is \(4,\)"):
        layout.box((4,), 0)
    with pytest.raises(ValueError, match="has no rank 8"):
        layout.box((4, 4), 8)
    with pytest.raises(ValueError, match="which do not divide 12"):
        layout.filled(12)
    with pytest.raises(ValueError, match="'left' or 'right', not 'up'"):
        layout.filled(16, "up")
    with pytest.raises(ValueError, match="do not tell the shape"):
        Layout([2], [0], uneven=True).full_shape((3,))
    with pytest.raises(ValueError, match="needs 2 placements, not 1"):
        from_placements([2, 2], [None], 1)
    with pytest.raises(ValueError, match="cuts dimension 1 of a tensor that has 1"):
        from_placements([2], [1], 1)


def test_prime_factors_multiply_to_the_number() -> None:
    assert [prime_factors(n) for n in (1, 2, 7, 8, 12)] == [(1,), (2,), (7,), (2, 2, 2), (2, 2, 3)]
    for number in range(1, 300):
        factors = prime_factors(number)
        assert math.prod(factors) == number and list(factors) == sorted(factors)
        assert all(f == 1 or all(f % d for d in range(2, f)) for f in factors)
