"""Strategies for all operators from those given for a few: MindSpore's vectors, both ways."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from hvdlite.common.layouts.layout import Layout
from hvdlite.common.layouts.operators import (
    Operator,
    candidates,
    cuts_of,
    elementwise,
    layout_of,
    matmul,
)
from hvdlite.common.layouts.propagation import check_search, leaf_layouts, propagate

N = 64
SQUARE = (N, N)


def block() -> list[Operator]:
    """Two layers: MatMul1, Add1, ReLU, MatMul2, Add2, with 64 x 64 everywhere."""
    return [
        matmul("MatMul1", ("x", SQUARE), ("w1", SQUARE), "a"),
        elementwise("Add1", [("a", SQUARE), ("b1", (N,))], "b"),
        elementwise("ReLU", [("b", SQUARE)], "c"),
        matmul("MatMul2", ("c", SQUARE), ("w2", SQUARE), "d"),
        elementwise("Add2", [("d", SQUARE), ("b2", (N,))], "e"),
    ]


EXPECTED = {
    "MatMul1": ((2, 1), (1, 4)),
    "Add1": ((2, 4), (4,)),
    "ReLU": ((2, 4),),
    "MatMul2": ((2, 4), (4, 1)),
    "Add2": ((2, 4), (4,)),
}


@pytest.mark.parametrize("configured", ["MatMul1", "MatMul2"])
def test_the_block_of_mindspore(configured: str) -> None:
    choices = propagate(block(), {configured: EXPECTED[configured]}, 8)
    assert {name: choice.strategy for name, choice in choices.items()} == EXPECTED
    assert [choice.edge_bytes for choice in choices.values()] == [0] * 5
    assert [choice.own_bytes for choice in choices.values()] == [0, 0, 0, 12288, 0]
    shapes = {
        name: [
            tuple(b - a for a, b in layout.box(operand.shape, 0))
            for operand, layout in zip(operator.inputs, choices[name].inputs, strict=True)
        ]
        for name, operator in ((each.name, each) for each in block())
    }
    assert shapes["MatMul1"] == [(32, 64), (64, 16)]
    assert shapes["Add1"] == [(32, 16), (16,)]
    assert shapes["MatMul2"] == [(32, 16), (16, 64)]


def test_strategies_that_leave_devices_unused() -> None:
    choices = propagate(block(), {"MatMul1": EXPECTED["MatMul1"]}, 8, fully_use_devices=False)
    strategies = {name: choice.strategy for name, choice in choices.items()}
    assert strategies == {**EXPECTED, "Add2": ((2, 1), (1,))}


def test_rivals_of_the_first_operator_cost_nothing_on_the_edge() -> None:
    """Ties on the edge are broken by an operator's own bytes: those of its partial sums."""
    first = block()[0]
    own = {cuts: first.own_bytes(cuts) for cuts in [(2, 1, 4), (1, 2, 4), (2, 4, 1), (1, 8, 1)]}
    assert list(own.values()) == [0, 4096, 12288, 28672]


@pytest.mark.parametrize("ranks", [4, 8])
def test_rows_then_columns_cost_one_allgather(ranks: int) -> None:
    operators = [
        matmul("one", ("x", SQUARE), ("w1", SQUARE), "a"),
        matmul("two", ("a", SQUARE), ("w2", SQUARE), "b"),
    ]
    strategies = {"one": ((ranks, 1), (1, 1)), "two": ((1, 1), (1, ranks))}
    choices = propagate(operators, strategies, ranks)
    assert choices["one"].edge_bytes == 0
    assert choices["two"].edge_bytes == N * N * 4 * (ranks - 1) // ranks


def test_layouts_of_parameters() -> None:
    choices = propagate(block(), {"MatMul1": EXPECTED["MatMul1"]}, 8)
    layouts = leaf_layouts(block(), choices)
    assert list(layouts) == ["x", "w1", "b1", "w2", "b2"]
    parts = {
        name: [layouts[name].box(shape, rank) for rank in range(8)]
        for name, shape in (("w1", SQUARE), ("w2", SQUARE), ("b2", (N,)))
    }
    quarters = [(16 * i, 16 * i + 16) for i in range(4)] * 2
    assert parts["w1"] == [((0, 64), quarter) for quarter in quarters]
    assert parts["w2"] == [(quarter, (0, 64)) for quarter in quarters]
    assert parts["b2"] == [(quarter,) for quarter in quarters]


def test_without_strategies_all_is_data_parallel() -> None:
    choices = propagate(block(), {}, 8)
    assert choices["MatMul1"].strategy == ((8, 1), (1, 1))
    assert choices["Add2"].strategy == ((8, 1), (1,))
    assert sum(each.edge_bytes + each.own_bytes for each in choices.values()) == 0


def test_a_choice_has_the_fewest_bytes_of_all_candidates() -> None:
    """The oracle tries each candidate of each operator on a chain, as the rule says it."""
    rng = random.Random(4)
    for _ in range(10):
        rows, inner, outer = (rng.choice([8, 12, 16, 24]) for _ in range(3))
        left = matmul("left", ("x", (rows, inner)), ("w", (inner, outer)), "y")
        right = elementwise("right", [("y", (rows, outer))], "z")
        for cuts in candidates(left, 4, True):
            strategy = left.strategy(cuts)
            choice = propagate([left, right], {"left": strategy}, 4)["right"]
            every = [
                propagate([left, right], {"left": strategy, "right": right.strategy(c)}, 4)["right"]
                for c in candidates(right, 4, True)
            ]
            least = min(every, key=lambda each: (each.edge_bytes, each.strategy))
            assert (choice.edge_bytes, choice.strategy) == (least.edge_bytes, least.strategy)


def test_dimensions_that_an_operator_needs_whole() -> None:
    softmax = elementwise("softmax", [("y", SQUARE)], "z", uncut=[-1])
    operators = [matmul("m", ("x", SQUARE), ("w", SQUARE), "y"), softmax]
    choice = propagate(operators, {"m": ((1, 1), (1, 4))}, 4)["softmax"]
    assert choice.strategy == ((4, 1),)
    assert choice.edge_bytes == 4096 - 1024
    with pytest.raises(ValueError, match="softmax needs dimension 1 whole"):
        propagate(operators, {"softmax": ((1, 4),)}, 4)


def test_transposed_weights_and_batches() -> None:
    linear = matmul("l", ("x", (2, 8, 6)), ("w", (10, 6)), "y", transposed=True)
    assert linear.output.shape == (2, 8, 10)
    cuts = cuts_of(linear, ((2, 1, 1), (2, 1)), 4)
    assert layout_of(linear.output, cuts, 4) == Layout([2, 1, 1, 2], [3, -1, 0])


@pytest.mark.parametrize(
    ("strategy", "error", "text"),
    [
        (((2, 1),), ValueError, "has 2 inputs, and the strategy .* has 1"),
        (((2, 1, 1), (1, 4)), ValueError, "input 0 has the shape"),
        (((2, 2), (4, 1)), ValueError, "belong together by 2 and 4"),
        (((3, 1), (1, 1)), ValueError, "does not divide by .3, 1.: 64 by 3"),
        (((4, 1), (1, 4)), ValueError, "makes 16 parts, which do not divide 8 ranks"),
        (((0, 1), (1, 1)), ValueError, "cannot be cut into 0 parts"),
        ([(2, 1), (1, 4)], TypeError, "a tuple of tuples"),
        (((2, 1), [1, 4]), TypeError, "a tuple of tuples"),
        (((2.0, 1), (1, 4)), TypeError, "has ints, not 2.0"),
        (((True, 1), (1, 4)), TypeError, "has ints, not True"),
        (None, TypeError, "a tuple of tuples"),
    ],
)
def test_refused_strategies(strategy: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        propagate(block(), {"MatMul1": strategy}, 8)


def test_mindspores_example_with_a_bias_of_ten_is_refused() -> None:
    operators = [
        matmul("m", ("x", (32, 128)), ("w", (128, 10)), "y"),
        elementwise("bias", [("y", (32, 10)), ("b", (10,))], "z"),
    ]
    with pytest.raises(ValueError, match=r"\(10,\) does not divide by \(8,\): 10 by 8"):
        propagate(operators, {"bias": ((4, 2), (8,))}, 8)


def test_refused_names_and_searches() -> None:
    with pytest.raises(ValueError, match="'MatMul3', which is no operator; there are MatMul1"):
        propagate(block(), {"MatMul3": ((1, 1), (1, 1))}, 8)
    with pytest.raises(ValueError, match="two operators have one name"):
        propagate([*block(), *block()], {}, 8)
    with pytest.raises(ValueError, match="is unknown"):
        check_search("magic")
    for search in ("propagation", "dynamic_programming", "recursive_programming"):
        check_search(search)
    check_search("sharding_propagation")
    with pytest.raises(ValueError, match="cannot be multiplied"):
        matmul("m", ("x", (3, 4)), ("w", (5, 6)), "y")
    with pytest.raises(ValueError, match="cannot be broadcast"):
        elementwise("e", [("x", (3, 4)), ("y", (3,))], "z")


@pytest.mark.thorough
def test_a_thousand_operators_on_64_ranks_take_less_than_two_seconds() -> None:
    """With shapes that differ from layer to layer, so that nothing is known from the one before."""
    operators: list[Operator] = []
    width, name = 64, "x"
    for layer in range(334):
        wider = 64 * (1 + layer % 7)
        here = {"left": (name, (256, width)), "right": (f"w{layer}", (width, wider))}
        operators.append(matmul(f"m{layer}", here["left"], here["right"], f"y{layer}"))
        bias = (f"b{layer}", (wider,))
        operators.append(elementwise(f"a{layer}", [(f"y{layer}", (256, wider)), bias], f"z{layer}"))
        operators.append(elementwise(f"r{layer}", [(f"z{layer}", (256, wider))], f"v{layer}"))
        width, name = wider, f"v{layer}"
    start = time.process_time()
    choices = propagate(operators, {"m0": ((8, 1), (1, 8))}, 64)
    assert time.process_time() - start < 2
    assert len(choices) == 1002
    assert all(choice.output.ranks == 64 for choice in choices.values())
