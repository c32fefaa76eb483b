"""Strategies: what is accepted, what is refused and with which words, and who takes which part."""

from __future__ import annotations

from typing import Any

import pytest

from hvdlite.data.strategies import Part, Strategy, parse, parse_patches, plan, plan_patches

RANKS = 8
IMAGES = (16, 8, 32, 32)
LABELS = (16,)

ACCEPTED: list[tuple[Any, list[tuple[int, ...]], list[list[Part]]]] = [
    # strategy, shapes, the parts of rank 5
    (((1, 1, 1, 8), (8,)), [IMAGES, LABELS], [[Part(3, 8, 5)], [Part(0, 8, 5)]]),
    (((1, 1, 1, 8), (1,)), [IMAGES, LABELS], [[Part(3, 8, 5)], []]),
    (((1, 1, 1, 1, 1), (1,)), [(2, 3, 4, 5, 6), LABELS], [[], []]),
    (((8, 1, 1, 1), (8,)), [IMAGES, LABELS], [[Part(0, 8, 5)], [Part(0, 8, 5)]]),
    (((1, 1, 1, 4), (1,)), [IMAGES, LABELS], [[Part(3, 4, 1)], []]),
    ("data_parallel", [IMAGES, LABELS], [[Part(0, 8, 5)], [Part(0, 8, 5)]]),
    ("full_batch", [IMAGES, (), (3,)], [[], [], []]),
    (((1, 2, 1, 1), ()), [IMAGES, ()], [[Part(1, 2, 1)], []]),
    (((1, 1), (8, 1)), [(3, 3), (16, 1)], [[], [Part(0, 8, 5)]]),
]


@pytest.mark.parametrize(("strategy", "shapes", "parts"), ACCEPTED, ids=str)
def test_accepted(strategy: Any, shapes: list[tuple[int, ...]], parts: list[list[Part]]) -> None:
    planned = plan(parse(strategy), shapes, RANKS, 5)
    assert [list(each) for each in planned] == parts


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (((1, 1, 4, 2), (1,)), "input 0 is cut in 2 dimensions, [2, 3]"),
        (((2, 1, 1, 4), (1,)), "input 0 is cut in 2 dimensions, [0, 3]"),
        (((1, 1, 1, 1), (8,)), "most dimensions, 4, must be cut into the most "
         "parts: it is cut into 1, another one into 8"),
        (((8, 1, 1, 1), (4,)), "inputs are cut into 8 and 4 parts: all inputs are "
         "cut into one number"),
        ("data_paralel", "strategy 'data_paralel' is unknown: did you mean 'data_parallel'?"),
        ("rows", "strategy 'rows' is unknown: Give 'data_parallel', 'full_batch'"),
        ((), "strategy () has no inputs"),
        (((1, 0), (1,)), "input 0 is cut into 0 parts"),
        (((1, -2), (1,)), "input 0 is cut into -2 parts"),
    ],
    ids=str,
)  # fmt: skip
def test_impossible(strategy: Any, words: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse(strategy)
    assert words in str(raised.value) and repr(strategy) in str(raised.value)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (None, "not NoneType None"),
        ([[1, 8]], "not list [[1, 8]]"),
        (((1, 8), [8]), "input 1 has list [8]"),
        (((1, 8.0), (8,)), "input 0 has float 8.0"),
        (((1, True), (1,)), "input 0 has bool True"),
        ((1, 8), "input 0 has int 1"),
        (8, "not int 8"),
    ],
    ids=str,
)
def test_of_another_type(strategy: Any, words: str) -> None:
    with pytest.raises(TypeError, match="strategy") as raised:
        parse(strategy)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("strategy", "shapes", "ranks", "words"),
    [
        (((1, 1, 1, 8), (1,)), [IMAGES], 8, "has 2 inputs, the batch has 1, of shapes "
         "['(16, 8, 32, 32)']"),
        (((1, 1, 8), (1,)), [IMAGES, LABELS], 8, "input 0 has 3 dimensions there, and 4 in "
         "the batch, where its shape is (16, 8, 32, 32)"),
        (((1, 1, 1, 8), (8,)), [IMAGES, (15,)], 8, "input 1 of shape (15,) cannot be cut into 8 "
         "equal parts along dimension 0, whose size is 15"),
        (((1, 1, 1, 8), (1,)), [IMAGES, LABELS], 4, "8 parts do not divide 4 ranks"),
        (((1, 1, 1, 3), (1,)), [IMAGES, LABELS], 8, "3 parts do not divide 8 ranks"),
        ("data_parallel", [(12, 3)], 8, "input 0 of shape (12, 3) cannot be cut into 8"),
        ("data_parallel", [()], 8, "an input of shape () has no batch dimension"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit(strategy: Any, shapes: Any, ranks: int, words: str) -> None:
    with pytest.raises(ValueError) as raised:
        plan(parse(strategy), shapes, ranks, 0)
    assert words in str(raised.value) and str(strategy) in str(raised.value)


def test_parts_are_repeated_among_the_ranks() -> None:
    strategy: Strategy = ((1, 1, 1, 4), (1,))
    columns = [
        plan(strategy, [(2, 3, 32, 32), (2,)], RANKS, rank)[0][0].bounds(32)
        for rank in range(RANKS)
    ]
    assert columns == [(0, 8), (8, 16), (16, 24), (24, 32)] * 2


def test_patches_are_numbered_row_by_row_and_repeated() -> None:
    patches = parse_patches("data_parallel", (2, 3), (-2, -1))
    shapes = [(4, 3, 8, 9), (4, 8, 9), (4, 5)]
    for rank in range(12):
        image, mask, label = plan_patches(patches, shapes, 12, rank)
        row, column = divmod(rank % 6, 3)
        assert image == (Part(2, 2, row), Part(3, 3, column))
        assert mask == (Part(1, 2, row), Part(2, 3, column))
        assert label == ()


@pytest.mark.parametrize(
    ("patches", "dims", "error", "words"),
    [
        ([2, 2], (-2, -1), TypeError, "patches are two ints, of the height and of the "
         "width, not [2, 2]"),
        ((2, 2.0), (-2, -1), TypeError, "not (2, 2.0)"),
        ((2, 2), 1, TypeError, "patch_dims are two ints, of the height and of "
         "the width, not 1"),
        ((0, 2), (-2, -1), ValueError, "patches=(0, 2)"),
        ((2, 2), (1, 1), ValueError, "patch_dims=(1, 1)"),
        ((3, 2), (-2, -1), ValueError, "patches=(3, 2): 6 parts do not divide 4 ranks"),
        ((2, 2), (7, -1), ValueError, "input 0 of shape (2, 3, 7, 4) has no dimension 7"),
        ((2, 2), (-2, -1), ValueError, "cannot be cut into 2 equal parts along "
         "dimension 2, whose size is 7"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_patches(patches: Any, dims: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        plan_patches(parse_patches("data_parallel", patches, dims), [(2, 3, 7, 4)], 4, 0)
    assert words in str(raised.value)


def test_patches_need_images_and_the_default_strategy() -> None:
    with pytest.raises(ValueError, match=r"patches=\(2, 2\) and strategy 'full_batch'"):
        parse_patches("full_batch", (2, 2), (-2, -1))
    patches = parse_patches("data_parallel", (2, 2), (-2, -1))
    with pytest.raises(ValueError, match=r"no input is an image.*\(4, 5\)"):
        plan_patches(patches, [(4, 5)], 4, 0)
