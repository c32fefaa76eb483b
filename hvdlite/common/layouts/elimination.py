"""The best choice for each of many operators, where costs depend on neighbours alone.

Operators are eliminated one by one, as in dynamic programming over a chain: for each combination of
its neighbours' choices the best one of an operator is noted, with what it costs, until none is
left; then all are read back. A residual connection makes triples of neighbours, and rarely more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

# A table of more combinations is not made: an operator with many neighbours is decided before.
MOST_COMBINATIONS = 1 << 21


@dataclass(frozen=True)
class _Table:
    """Costs by the choices of some operators, in the order of their numbers."""

    of: tuple[int, ...]
    costs: Any


def eliminate(alone: Sequence[Any], pairs: Mapping[tuple[int, int], Any]) -> list[int]:
    """Return the number of the best choice of each operator.

    `alone` has for each of them what its choices cost, and `pairs` what those of two cost together.
    """
    tables = [_Table((index,), each) for index, each in enumerate(alone)]
    tables += [_Table(pair, table) for pair, table in pairs.items()]
    by_operator: dict[int, set[int]] = {index: set() for index in range(len(alone))}
    for number, table in enumerate(tables):
        for index in table.of:
            by_operator[index].add(number)
    neighbours: list[set[int]] = [set() for _ in alone]
    for one, other in pairs:
        neighbours[one].add(other)
        neighbours[other].add(one)
    sizes = [len(each) for each in alone]
    steps: list[tuple[int, tuple[int, ...], Any]] = []
    left = set(range(len(sizes)))
    while left:
        others: tuple[int, ...] = ()
        index = min(left, key=lambda each: (_product(sizes, neighbours[each]), each))
        if _product(sizes, neighbours[index]) * sizes[index] > MOST_COMBINATIONS:
            index = max(left, key=lambda each: (len(neighbours[each]), -each))
            best = _sum_of([tables[n] for n in by_operator[index]], (index,), least=True)
            chosen = int(best.argmin())
            steps.append((index, (), chosen))
        else:
            others = tuple(sorted(neighbours[index]))
            joined = _sum_of([tables[n] for n in by_operator[index]], (*others, index))
            steps.append((index, others, joined.argmin(-1)))
            chosen = -1
        _remove(index, others, chosen, tables, by_operator, neighbours)
        if chosen < 0 and others:
            number = len(tables)
            tables.append(_Table(others, joined.min(-1)))
            for each in others:
                by_operator[each].add(number)
        left.remove(index)
    found = [0] * len(sizes)
    for index, others, best in reversed(steps):
        found[index] = int(best[tuple(found[each] for each in others)]) if others else int(best)
    return found


def _product(sizes: Sequence[int], of: Collection[int]) -> int:
    return math.prod(sizes[each] for each in of)


def _remove(
    index: int,
    others: tuple[int, ...],
    chosen: int,
    tables: list[_Table],
    by_operator: dict[int, set[int]],
    neighbours: list[set[int]],
) -> None:
    """Take an operator out of the tables; those of a chosen one stay, for its neighbours."""
    for number in sorted(by_operator.pop(index)):
        table = tables[number]
        for each in table.of:
            if each != index:
                by_operator[each].discard(number)
        if chosen >= 0 and len(table.of) > 1:
            place = table.of.index(index)
            rest = tuple(each for each in table.of if each != index)
            tables.append(_Table(rest, table.costs.take(chosen, axis=place)))
            for each in rest:
                by_operator[each].add(len(tables) - 1)
    for each in neighbours[index]:
        neighbours[each].discard(index)
        neighbours[each] |= set(others) - {each}


def _sum_of(tables: Sequence[_Table], of: tuple[int, ...], least: bool = False) -> Any:
    """Return the sum of tables by the choices of `of`; others are taken at their least."""
    shaped = []
    for table in tables:
        costs = table.costs
        inside = tuple(each for each in table.of if each in of)
        if least:
            away = tuple(i for i, each in enumerate(table.of) if each not in of)
            costs = costs.min(axis=away) if away else costs
        order = sorted(range(len(inside)), key=lambda i: of.index(inside[i]))
        costs = costs.transpose(order)
        lengths = iter(costs.shape)
        shaped.append(costs.reshape([next(lengths) if each in inside else 1 for each in of]))
    return reduce(lambda a, b: a + b, shaped)
