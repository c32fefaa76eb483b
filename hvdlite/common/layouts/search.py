"""Strategies for all operators of a graph by search: the fewest bytes in a step of training.

What a strategy costs depends on those of the neighbours alone, so that `elimination` finds the best
ones.

Counted are the bytes that a rank receives forward and backward: between operators, for partial
sums, and for gradients of parameters that several ranks have. Bytes from other hosts, and what a
rank computes, count as bytes that take as long. This module never sees a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from hvdlite.common.layouts.elimination import eliminate
from hvdlite.common.layouts.exchange import along, missing_by_link
from hvdlite.common.layouts.layout import Layout, prime_factors
from hvdlite.common.layouts.operators import Operand, Operator, candidates, layout_of
from hvdlite.common.layouts.transfer import allreduce_bytes, bytes_to_receive, common_shape

Cuts = tuple[int, ...]
_ROUNDS = 24


@dataclass(frozen=True)
class Speed:
    """What takes as long as a byte between ranks of a host.

    `host_of`: the host of each rank; none: all have one. `between`: a byte from another host takes
    as long as so many. `operations`: so many are done meanwhile.
    """

    host_of: tuple[int, ...] = ()
    between: int = 8
    operations: int = 16


@dataclass(frozen=True)
class Ends:
    """Tensors that no operator of the graph makes or takes alone.

    `parameters` by name with the bytes of an element; `batches` come, and `outputs` go, as shares
    of their first dimension. `memory_limit`: the most bytes that a rank holds of parameters, each
    as many times as `copies` says, with its gradient and what the optimizer keeps of it.
    """

    parameters: Mapping[str, int] = field(default_factory=dict)
    batches: Collection[str] = ()
    outputs: Collection[str] = ()
    memory_limit: int | None = None
    copies: Mapping[str, int] = field(default_factory=dict)
    speed: Speed = Speed()


def search(
    operators: Sequence[Operator],
    decided: Mapping[str, Cuts],
    ranks: int,
    fully_use_devices: bool,
    ends: Ends,
    recursive: bool = False,
) -> dict[str, Cuts]:
    """Return how the axes of all operators are cut; `decided` has those that are given.

    `recursive` cuts by one prime factor of the ranks after the other, for large graphs. Raises
    `ValueError` where no strategies hold the memory limit.
    """
    if not recursive:
        choices = {
            each.name: [decided[each.name]]
            if each.name in decided
            else candidates(each, ranks, fully_use_devices and not each.is_view)
            for each in operators
        }
        return _solve(operators, choices, ranks, ends, ends.memory_limit)
    found = {each.name: (1,) * len(each.lengths) for each in operators}
    product = 1
    for factor in prime_factors(ranks):
        product *= factor
        choices = {
            each.name: _finer(each, found[each.name], factor, decided, fully_use_devices)
            for each in operators
        }
        # What is cut among few ranks now is cut more finely later.
        limit = None if ends.memory_limit is None else ends.memory_limit * ranks // product
        found = _solve(operators, choices, product, ends, limit, is_last=product == ranks)
    return found


def _finer(
    operator: Operator, cuts: Cuts, factor: int, decided: Mapping[str, Cuts], fully: bool
) -> list[Cuts]:
    """Return the ways to cut one axis once more by a factor; not at all where that is allowed."""
    found = [
        (*cuts[:axis], cuts[axis] * factor, *cuts[axis + 1 :])
        for axis, length in enumerate(operator.lengths)
        if axis not in operator.uncut and length and length % (cuts[axis] * factor) == 0
    ]
    goal = decided.get(operator.name)
    if goal is not None:
        return [each for each in found if all(g % c == 0 for g, c in zip(goal, each, strict=True))][
            :1
        ] or [cuts]
    return found if found and fully and not operator.is_view else [*found, cuts]


def _solve(
    operators: Sequence[Operator],
    choices: Mapping[str, list[Cuts]],
    ranks: int,
    ends: Ends,
    memory_limit: int | None,
    is_last: bool = True,
) -> dict[str, Cuts]:
    """Return the best choices; within a limit by a price for memory that rises until they fit."""
    costs = _Costs(operators, choices, ranks, ends)
    found = costs.best()
    if memory_limit is None or costs.memory(found) <= memory_limit:
        return costs.named(found)
    low, high = 0.0, 1e9
    found = costs.best(high)
    if costs.memory(found) > memory_limit:
        if not is_last:
            return costs.named(found)
        what = "parameters, gradients and optimizer state" if ends.copies else "parameters"
        raise ValueError(
            f"memory_limit={memory_limit}: a rank holds at least {costs.memory(found)} bytes of "
            f"{what}, however they are cut among {ranks} ranks"
        )
    for _ in range(_ROUNDS):
        price = math.sqrt(max(low, 1e-6) * high)
        attempt = costs.best(price)
        if costs.memory(attempt) <= memory_limit:
            found, high = attempt, price
        else:
            low = price
    return costs.named(found)


class _Costs:
    """What choices cost: of each operator alone, and of each two that share a tensor."""

    def __init__(
        self,
        operators: Sequence[Operator],
        choices: Mapping[str, list[Cuts]],
        ranks: int,
        ends: Ends,
    ) -> None:
        self._operators, self._ranks, self._ends = operators, ranks, ends
        self.choices = [choices[each.name] for each in operators]
        self.alone = [
            np.array([self._by_itself(each, cuts) for cuts in choices[each.name]])
            for each in operators
        ]
        self.held = [np.zeros(len(choices[each.name])) for each in operators]
        self.pairs: dict[tuple[int, int], Any] = {}
        self._known: dict[Any, Any] = {}
        maker = {out.tensor: i for i, each in enumerate(operators) for out in each.outputs}
        first: dict[str, tuple[int, Operand]] = {}
        for index, operator in enumerate(operators):
            for operand in operator.inputs:
                self._count(index, operator, operand, maker, first)
            for output in operator.outputs:
                if output.tensor in ends.outputs:
                    self._add_share(index, output, operator.bytes_per_element)

    def best(self, price: float = 0.0) -> list[int]:
        """Return the number of the best choice of each operator, with a price for memory."""
        pairs = zip(self.alone, self.held, strict=True)
        return eliminate([alone + price * held for alone, held in pairs], self.pairs)

    def named(self, found: Sequence[int]) -> dict[str, Cuts]:
        pairs = zip(self._operators, self.choices, found, strict=True)
        return {operator.name: cuts[index] for operator, cuts, index in pairs}

    def memory(self, found: Sequence[int]) -> int:
        """Return the bytes of parameters that a rank holds."""
        return int(sum(held[index] for held, index in zip(self.held, found, strict=True)))

    def _count(
        self,
        index: int,
        operator: Operator,
        operand: Operand,
        maker: Mapping[str, int],
        first: dict[str, tuple[int, Operand]],
    ) -> None:
        tensor, size = operand.tensor, operator.bytes_per_element
        if tensor in self._ends.parameters:
            size = self._ends.parameters[tensor]
        makes = maker.get(tensor)
        if makes is not None and makes != index:
            self._add_pair(makes, self._operators[makes].result(tensor), index, operand, size)
        elif tensor in self._ends.batches:
            self._add_share(index, operand, size)
        if tensor in self._ends.parameters and makes is None:
            if tensor in first:
                self._add_pair(*first[tensor], index, operand, size)
            else:
                first[tensor] = index, operand
                kept = size * self._ends.copies.get(tensor, 1)
                self.held[index] += [
                    self._local(operand, cuts, kept) for cuts in self.choices[index]
                ]
        if makes is not None or tensor in self._ends.parameters or tensor in self._ends.batches:
            self.alone[index] += [
                self._gradient(operand, cuts, size) for cuts in self.choices[index]
            ]

    def _by_itself(self, operator: Operator, cuts: Cuts) -> float:
        """Return what an operator costs alone: what it exchanges comes back as gradients."""
        summed = operator.own_bytes(cuts) * self._slowness(cuts, operator.summed)
        around: float = 2 * operator.exchanged_bytes(cuts)
        if operator.exchanged is not None:
            around *= self._slowness(cuts, (operator.exchanged[0],))
        # Backward computes the gradients of two inputs.
        return summed + around + 3 * operator.operations(cuts) / self._ends.speed.operations

    def _slowness(self, cuts: Cuts, axes: Sequence[int]) -> float:
        """Return how many bytes count for one that ranks along some axes exchange."""
        speed = self._ends.speed
        matrix = (*cuts, self._ranks // math.prod(cuts))
        if not speed.host_of or self._ranks != len(speed.host_of):
            return 1.0
        return _slowness(matrix, tuple(axes), speed)

    def _local(self, operand: Operand, cuts: Cuts, size: int) -> int:
        parts = (1 if axis is None else cuts[axis] for axis in operand.axes)
        return math.prod(operand.shape) * size // max(math.prod(parts), 1)

    def _gradient(self, operand: Operand, cuts: Cuts, size: int) -> float:
        """Return the bytes for a gradient of which ranks compute summands."""
        parts = math.prod(cut for axis, cut in enumerate(cuts) if axis not in operand.axes)
        axes = [axis for axis in range(len(cuts)) if axis not in operand.axes]
        total = allreduce_bytes(self._local(operand, cuts, size), parts)
        return total * self._slowness(cuts, axes)

    def _add_share(self, index: int, operand: Operand, size: int) -> None:
        """Count a tensor that comes or goes as shares of the batch."""
        shape = operand.shape
        if not shape or shape[0] % self._ranks:
            return
        share = Layout((self._ranks,), (0, *[-1] * (len(shape) - 1)))
        self.alone[index] += [
            self._both_ways(share, layout_of(operand, cuts, self._ranks), shape, size)
            for cuts in self.choices[index]
        ]

    def _add_pair(self, one: int, held: Operand, other: int, wanted: Operand, size: int) -> None:
        key = (
            held.axes, tuple(self.choices[one]), wanted.axes, tuple(self.choices[other]),
            held.shape, size,
        )  # fmt: skip
        if key not in self._known:  # Equal layers are counted once.
            rows = [layout_of(held, cuts, self._ranks) for cuts in self.choices[one]]
            columns = [layout_of(wanted, cuts, self._ranks) for cuts in self.choices[other]]
            self._known[key] = np.array(
                [[self._both_ways(a, b, held.shape, size) for b in columns] for a in rows],
                dtype=float,
            )
        table = self._known[key]
        if one == other:
            self.alone[one] = self.alone[one] + table.diagonal()
            return
        pair = (one, other) if one < other else (other, one)
        table = table if one < other else table.T
        self.pairs[pair] = self.pairs[pair] + table if pair in self.pairs else table

    def _both_ways(self, a: Layout, b: Layout, shape: tuple[int, ...], size: int) -> float:
        return self._moved(a, b, shape, size) + self._moved(b, a, shape, size)

    def _moved(self, held: Layout, wanted: Layout, shape: tuple[int, ...], size: int) -> float:
        speed = self._ends.speed
        if len(set(speed.host_of)) < 2 or self._ranks != len(speed.host_of):
            return bytes_to_receive(held, wanted, shape, size)
        small = common_shape(held, wanted)
        inside, between = missing_by_link(held, wanted, small, speed.host_of)
        bytes_per_element = math.prod(shape) * size / math.prod(small)
        return (inside + speed.between * between) * bytes_per_element


@lru_cache(maxsize=1 << 12)
def _slowness(matrix: tuple[int, ...], axes: tuple[int, ...], speed: Speed) -> float:
    """Return how many bytes count for one that ranks exchange along some axes of a matrix.

    They exchange inside of their hosts first, then between these.
    """
    most = 1.0
    for rank in range(math.prod(matrix)):
        members = along(matrix, axes, rank)
        hosts = len({speed.host_of[each] for each in members})
        if hosts > 1:
            each = len(members) // hosts
            share = (hosts - 1) / hosts / max(each, 1) / ((len(members) - 1) / len(members))
            most = max(most, 1 + (speed.between - 1) * share)
    return most
