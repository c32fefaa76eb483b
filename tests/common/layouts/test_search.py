"""The search finds what trying all combinations of strategies finds, on random small graphs."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest

from hvdlite.common.layouts import elimination
from hvdlite.common.layouts.exchange import missing_by_link
from hvdlite.common.layouts.layout import Layout
from hvdlite.common.layouts.operators import (
    Operator,
    candidates,
    elementwise,
    layout_of,
    matmul,
)
from hvdlite.common.layouts.propagation import find_choices
from hvdlite.common.layouts.search import Ends, Speed, search
from hvdlite.common.layouts.transfer import allreduce_bytes, bytes_to_receive


def graph(chooser: random.Random, length: int) -> list[Operator]:
    """Products and sums of what came before, so that some tensors are used several times."""
    made = ["x"]
    operators: list[Operator] = []
    for index in range(length):
        name, one = f"op{index}", (chooser.choice(made), (8, 8))
        if chooser.random() < 0.5:
            weight = (f"w{chooser.randrange(3)}", (8, 8))
            operators.append(matmul(name, one, weight, f"t{index}"))
        else:
            other = (chooser.choice(made), (8, 8))
            operators.append(elementwise(name, [one, other], f"t{index}"))
        made.append(f"t{index}")
    return operators


def cost(operators: list[Operator], cuts: dict[str, Any], ranks: int, ends: Ends) -> int:
    """Count the bytes of a step in the plainest way."""
    held = {
        each.output.tensor: layout_of(each.output, cuts[each.name], ranks) for each in operators
    }
    for name in ends.batches:
        held[name] = Layout((ranks,), (0, -1))
    total = 0
    for operator in operators:
        chosen = cuts[operator.name]
        total += operator.own_bytes(chosen)
        for operand in operator.inputs:
            wanted = layout_of(operand, chosen, ranks)
            before = held.setdefault(operand.tensor, wanted)
            total += bytes_to_receive(before, wanted, operand.shape, 4)
            total += bytes_to_receive(wanted, before, operand.shape, 4)
            missing = [n for axis, n in enumerate(chosen) if axis not in operand.axes]
            parts = 1
            for n in missing:
                parts *= n
            elements = 64
            for cut in wanted.cuts:
                elements //= cut
            total += allreduce_bytes(4 * elements, parts)
        if operator.output.tensor in ends.outputs:
            share, own = Layout((ranks,), (0, -1)), held[operator.output.tensor]
            total += bytes_to_receive(own, share, (8, 8), 4)
            total += bytes_to_receive(share, own, (8, 8), 4)
    return total


@pytest.mark.parametrize("seed", range(20))
def test_all_combinations(seed: int) -> None:
    chooser = random.Random(seed)
    ranks = chooser.choice([2, 4])
    operators = graph(chooser, 5 if ranks == 2 else 4)
    ends = Ends(dict.fromkeys(["w0", "w1", "w2"], 4), ["x"], [operators[-1].output.tensor])
    found = search(operators, {}, ranks, True, ends)
    options = [candidates(each, ranks, True) for each in operators]
    names = [each.name for each in operators]
    least = min(
        cost(operators, dict(zip(names, each, strict=True)), ranks, ends)
        for each in itertools.product(*options)
    )
    assert cost(operators, found, ranks, ends) == least
    recursive = search(operators, {}, ranks, True, ends, recursive=True)
    assert cost(operators, recursive, ranks, ends) >= least


@pytest.mark.parametrize("recursive", [False, True])
def test_a_limit_of_memory(recursive: bool) -> None:
    operators = [
        matmul("up", ("x", (64, 64)), ("w1", (64, 256)), "a"),
        elementwise("relu", [("a", (64, 256))], "b"),
        matmul("down", ("b", (64, 256)), ("w2", (256, 64)), "c"),
    ]
    size = 2 * 64 * 256 * 4

    def strategies(limit: int | None) -> dict[str, Any]:
        ends = Ends({"w1": 4, "w2": 4}, ["x"], ["c"], limit)
        found = find_choices(operators, {}, 4, ends, recursive=recursive)
        return {name: choice.strategy for name, choice in found.items()}

    assert set(strategies(None)) == {"up", "relu", "down"}
    fitting = strategies(size // 4)
    for name in ("up", "down"):
        a, b = fitting[name][1]
        assert a * b == 4, fitting
    with pytest.raises(ValueError, match=f"memory_limit=1: a rank holds at least {size // 4} "):
        strategies(1)


def feed_forward(width: int, samples: int) -> list[Operator]:
    return [
        matmul("up", ("x", (samples, width)), ("w1", (width, 4 * width)), "a"),
        elementwise("relu", [("a", (samples, 4 * width))], "b"),
        matmul("down", ("b", (samples, 4 * width)), ("w2", (4 * width, width)), "c"),
    ]


@pytest.mark.parametrize("recursive", [False, True])
def test_gradients_and_the_state_of_the_optimizer_are_in_the_limit(recursive: bool) -> None:
    operators, size = feed_forward(64, 64), 2 * 64 * 256 * 4

    def found(limit: int) -> dict[str, Any]:
        copies = {"w1": 4, "w2": 4}
        ends = Ends({"w1": 4, "w2": 4}, ["x"], ["c"], limit, copies)
        return search(operators, {}, 4, True, ends, recursive)

    assert found(size)["up"][1:] != (1, 1), "four times a quarter"
    with pytest.raises(ValueError, match=f"{size} bytes of parameters, gradients and optimizer"):
        found(size - 1)


def test_bytes_by_link() -> None:
    whole, rows = Layout((2, 2), (-1, -1)), Layout((2, 2), (0, -1))
    assert missing_by_link(rows, whole, (4, 1), (0, 0, 1, 1)) == (2, 0)
    assert missing_by_link(rows, whole, (4, 1), (0, 1, 0, 1)) == (0, 2)


def test_what_is_exchanged_in_each_layer_stays_inside_of_hosts() -> None:
    """Neighbours share columns where they are of one host; otherwise only samples are cut."""
    operators = feed_forward(64, 256)

    def up(*hosts: int) -> Any:
        ends = Ends({"w1": 4, "w2": 4}, ["x"], ["c"], speed=Speed(hosts))
        return search(operators, {}, 4, True, ends)["up"]

    assert up() == up(0, 0, 0, 0) == up(0, 0, 1, 1) == (2, 1, 2)
    assert up(0, 1, 0, 1) == (4, 1, 1)


def test_operations_cost_as_bytes_do() -> None:
    """What needs all of a product has it computed everywhere, unless that takes longer."""
    operators = [
        matmul("up", ("x", (64, 64)), ("w", (64, 64)), "a"),
        elementwise("norm", [("a", (64, 64))], "b", uncut=(0, 1)),
    ]
    for operations, parts in ((1, 4), (10**9, 1)):
        ends = Ends(speed=Speed(operations=operations))
        cuts = search(operators, {}, 4, False, ends)["up"]
        assert cuts[0] * cuts[2] == parts, cuts


def test_given_strategies_are_kept() -> None:
    operators = graph(random.Random(1), 12)
    given = next(each for each in operators if len(each.lengths) == 3)
    ends = Ends(batches=["x"])
    for recursive in (False, True):
        cuts = search(operators, {given.name: (2, 1, 4)}, 8, True, ends, recursive)
        assert cuts[given.name] == (2, 1, 4)


def test_many_equal_layers() -> None:
    """The tables of equal layers are made once, so that 48 of 16 operators take seconds."""
    operators: list[Operator] = []
    x = "x"
    shape = (64, 64)
    for layer in range(48):
        q, k, v, out = (f"{layer}.{name}" for name in ("q", "k", "v", "out"))
        for name in (q, k, v):
            operators.append(matmul(name, (x, shape), (f"{name}.w", shape), f"{name}.y"))
        operators.append(elementwise(f"{layer}.mix", [(f"{n}.y", shape) for n in (q, k, v)], q))
        before = q
        for number in range(8):
            operators.append(elementwise(f"{layer}.{number}", [(before, shape)], f"{q}{number}"))
            before = f"{q}{number}"
        operators.append(matmul(out, (before, shape), (f"{out}.w", shape), f"{out}.y"))
        operators.append(elementwise(f"{layer}.add", [(x, shape), (f"{out}.y", shape)], out))
        x = out
    started = time.process_time()
    found = search(operators, {}, 8, True, Ends({}, ["x"], [x]))
    assert len(found) == len(operators)
    assert time.process_time() - started < 10, "they take less than one second alone"


def test_an_operator_with_many_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a table would have too many combinations, one operator is decided before."""
    monkeypatch.setattr(elimination, "MOST_COMBINATIONS", 8)
    operators = graph(random.Random(3), 10)
    found = search(operators, {}, 4, True, Ends(batches=["x"]))
    assert all(found[each.name] in candidates(each, 4, True) for each in operators), (
        "each has a strategy of its own"
    )
