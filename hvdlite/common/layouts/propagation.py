"""Strategies for all operators of a graph from those that were given for a few.

From the configured operators on, breadth first, forward and backward, each operator gets the
strategy whose inputs and output are nearest to those that its neighbours have: the one for which a
rank receives the fewest bytes on the edges, then the fewest for its own partial sums, then the one
that cuts least of what a later operator needs whole, then the smallest one. This module never sees
a tensor.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdlite.common.layouts.layout import Layout
from hvdlite.common.layouts.operators import (
    Operand,
    Operator,
    Strategy,
    candidates,
    cuts_of,
    layout_of,
    summed_gradient,
)
from hvdlite.common.layouts.search import Ends, search
from hvdlite.common.layouts.transfer import bytes_to_receive

PROPAGATION = "propagation"
# A layout in which an operator wants a tensor, and where ranks have summands of the gradient then.
Wish = tuple[Layout, tuple[int, ...]]
DYNAMIC, RECURSIVE = "dynamic_programming", "recursive_programming"


@dataclass(frozen=True)
class Choice:
    """How an operator is cut, and what a rank receives for it.

    `edge_bytes`: while its inputs come into their layouts; `own_bytes`: while partial sums become
    sums, and inside of the operator.
    """

    strategy: Strategy
    cuts: tuple[int, ...]
    inputs: tuple[Layout, ...]
    output: Layout
    edge_bytes: int
    own_bytes: int


def check_search(name: str) -> None:
    """Raise `ValueError` for a way to search that there is not."""
    known = (PROPAGATION, f"sharding_{PROPAGATION}", DYNAMIC, RECURSIVE)
    if name not in known:
        raise ValueError(f"search={name!r} is unknown: use one of {', '.join(known)}")


def propagate(
    operators: Sequence[Operator],
    configured: Mapping[str, Strategy],
    ranks: int,
    fully_use_devices: bool = True,
    batches: Sequence[str] = (),
) -> dict[str, Choice]:
    """Return how each operator is cut, by name, in the order of the operators.

    `configured` has strategies by the names of operators; an operator that no configured one is
    connected with is data parallel, from those on that take the tensors `batches`. Raises
    `TypeError` and `ValueError` as `cuts_of`, and `ValueError` for a name that no operator has, or
    that two have.
    """
    graph = _configured(operators, configured, ranks, fully_use_devices)
    graph.spread(list(configured))
    axes = graph.batch_axes(batches)
    for name in [*axes, *graph.operators]:
        if name not in graph.cuts:
            graph.cuts[name] = graph.data_parallel(name, axes.get(name, 0))
            graph.spread([name], by_samples=True)
    return graph.choices()


def find_choices(
    operators: Sequence[Operator],
    configured: Mapping[str, Strategy],
    ranks: int,
    ends: Ends,
    fully_use_devices: bool = True,
    recursive: bool = False,
) -> dict[str, Choice]:
    """Return how each operator is cut so that a step of training moves the fewest bytes.

    Raises as `propagate`, and `ValueError` where no strategies hold a memory limit.
    """
    graph = _configured(operators, configured, ranks, fully_use_devices)
    graph.cuts = search(operators, graph.cuts, ranks, fully_use_devices, ends, recursive)
    return graph.choices()


class Alternatives:
    """What other strategies of one operator would cost, all others staying as they are."""

    def __init__(
        self, operators: Sequence[Operator], choices: Mapping[str, Choice], ranks: int
    ) -> None:
        self._ranks = ranks
        self._graph = _Graph(operators, ranks, False)
        self._graph.cuts = {name: choice.cuts for name, choice in choices.items()}

    def of(self, name: str) -> dict[Strategy, int]:
        """Return by strategy the bytes that a rank receives before, in and after an operator.

        The strategy that it has comes first, then the others, the cheapest first.
        """
        operator = self._graph.operators[name]
        own = self._graph.cuts[name]
        costs = {
            cuts: self._graph.bytes_around(operator, cuts)
            for cuts in candidates(operator, self._ranks, False)
        }
        order = sorted(costs, key=lambda cuts: (cuts != own, costs[cuts], cuts))
        return {operator.strategy(cuts): costs[cuts] for cuts in order}


def _configured(
    operators: Sequence[Operator], configured: Mapping[str, Strategy], ranks: int, fully: bool
) -> _Graph:
    graph = _Graph(operators, ranks, fully)
    for name, strategy in configured.items():
        if name not in graph.operators:
            raise ValueError(
                f"a strategy is given for {name!r}, which is no operator; there are "
                f"{', '.join(list(graph.operators)[:8])}"
            )
        graph.cuts[name] = cuts_of(graph.operators[name], strategy, ranks)
    return graph


def _needed_whole(operators: Sequence[Operator]) -> dict[str, set[int]]:
    """Return by tensor the dimensions that an operator needs whole, now or after others.

    What is added to a tensor of which that is true had better be whole there, too.
    """
    needed: dict[str, set[int]] = {}
    for operator in [*reversed(operators), *reversed(operators)]:
        uncut = operator.uncut | {
            result.axes[dim] or 0
            for result in operator.outputs
            for dim in needed.get(result.tensor, ())
            if result.axes[dim] is not None
        }
        if not operator.summed:
            uncut |= {
                operand.axes[dimension] or 0
                for operand in operator.inputs
                for dimension in needed.get(operand.tensor, ())
                if operand.axes[dimension] is not None
            }
        for operand in operator.inputs:
            found = {
                dimension
                for dimension, axis in enumerate(operand.axes)
                if operand.shape[dimension] > 1 and (axis is None or axis in uncut)
            }
            needed.setdefault(operand.tensor, set()).update(found)
    return needed


def _wish(operand: Operand, cuts: tuple[int, ...], ranks: int) -> Wish:
    return layout_of(operand, cuts, ranks), summed_gradient(operand, cuts)


class _Graph:
    def __init__(self, operators: Sequence[Operator], ranks: int, fully_use_devices: bool) -> None:
        self._ranks = ranks
        self._fully = fully_use_devices
        self.operators = {operator.name: operator for operator in operators}
        if len(self.operators) < len(operators):
            raise ValueError("two operators have one name")
        self.cuts: dict[str, tuple[int, ...]] = {}
        self._producer: dict[str, str] = {}
        self._consumers: dict[str, list[str]] = {}
        for operator in operators:
            for operand in operator.inputs:
                self._consumers.setdefault(operand.tensor, []).append(operator.name)
            self._producer |= {each.tensor: operator.name for each in operator.outputs}
        self._needed_whole = _needed_whole(operators)

    def spread(self, names: list[str], by_samples: bool = False) -> None:
        """Decide all that is connected with these operators, which are decided.

        `by_samples`: of strategies that cost the same, take one that cuts the first axis most.
        """
        queue = deque(names)
        while queue:
            for neighbour in self._neighbours(queue.popleft()):
                if neighbour not in self.cuts:
                    self.cuts[neighbour] = self._best(neighbour, by_samples)
                    queue.append(neighbour)

    def _neighbours(self, name: str) -> list[str]:
        operator = self.operators[name]
        after = [name for each in operator.outputs for name in self._consumers.get(each.tensor, [])]
        before = [
            self._producer[operand.tensor]
            for operand in operator.inputs
            if operand.tensor in self._producer
        ]
        return [*after, *before]

    def _best(self, name: str, by_samples: bool) -> tuple[int, ...]:
        operator = self.operators[name]
        return min(
            candidates(operator, self._ranks, self._fully and not operator.is_view),
            key=lambda cuts: (
                self._bytes_before(operator, cuts) + self._bytes_after(operator, cuts),
                operator.own_bytes(cuts),
                -math.prod(cuts) if operator.is_view else 0,
                -cuts[0] if by_samples and cuts else 0,
                self._parts_of_needed(operator, cuts),
                operator.strategy(cuts),
            ),
        )

    def _parts_of_needed(self, operator: Operator, cuts: tuple[int, ...]) -> int:
        """Return into how many parts is cut what later operators need whole."""
        needed = self._needed_whole.get(operator.output.tensor, ())
        axes = [operator.output.axes[dimension] for dimension in needed]
        return math.prod(cuts[axis] for axis in axes if axis is not None)

    def batch_axes(self, batches: Sequence[str]) -> dict[str, int]:
        """Return the operators that take these tensors, each with the axis of samples."""
        found: dict[str, int] = {}
        for tensor in batches:
            for name in self._consumers.get(tensor, []):
                for operand in self.operators[name].inputs:
                    axis = operand.axes[0] if operand.axes else None
                    if operand.tensor == tensor and axis is not None:
                        found.setdefault(name, axis)
        return found

    def data_parallel(self, name: str, axis: int) -> tuple[int, ...]:
        """Return the cuts of an axis, as far as its length divides."""
        operator = self.operators[name]
        return max(
            candidates(operator, self._ranks, False),
            key=lambda cuts: (cuts[axis : axis + 1], [-cut for cut in cuts]),
        )

    def _bytes_before(
        self, operator: Operator, cuts: tuple[int, ...], in_order: bool = False
    ) -> int:
        """Return what a rank receives of the outputs of decided operators before this one.

        What another decided operator wants alike is received once, and counted there: the first of
        them counts it if `in_order`.
        """
        total = 0
        for place, operand in enumerate(operator.inputs):
            producer = self._producer.get(operand.tensor)
            if producer not in self.cuts or producer is None:
                continue
            wanted = _wish(operand, cuts, self._ranks)
            alike = [_wish(each, cuts, self._ranks) for each in operator.inputs[:place]
                     if each.tensor == operand.tensor]  # fmt: skip
            for name in self._consumers[operand.tensor]:
                if name == operator.name and in_order:
                    break
                if name != operator.name and name in self.cuts:
                    alike += self._wishes(name, operand.tensor)
            if wanted not in alike:
                held = self._layout(producer, self.operators[producer].result(operand.tensor))
                total += bytes_to_receive(
                    held, wanted[0], operand.shape, operator.bytes_per_element
                )
        return total

    def _bytes_after(self, operator: Operator, cuts: tuple[int, ...]) -> int:
        """Return what a rank receives of this output for decided operators after this one."""
        total = 0
        for output in operator.outputs:
            held = layout_of(output, cuts, self._ranks)
            wishes = {
                wish
                for consumer in self._consumers.get(output.tensor, [])
                if consumer in self.cuts
                for wish in self._wishes(consumer, output.tensor)
            }
            total += sum(
                bytes_to_receive(held, wanted, output.shape, operator.bytes_per_element)
                for wanted, _ in wishes
            )
        return total

    def _wishes(self, name: str, tensor: str) -> list[Wish]:
        """Return how a decided operator wants a tensor that it takes once, or several times."""
        return [
            _wish(operand, self.cuts[name], self._ranks)
            for operand in self.operators[name].inputs
            if operand.tensor == tensor
        ]

    def bytes_around(self, operator: Operator, cuts: tuple[int, ...]) -> int:
        """Return all that a rank receives because of an operator."""
        return (
            self._bytes_before(operator, cuts)
            + operator.own_bytes(cuts)
            + operator.exchanged_bytes(cuts)
            + self._bytes_after(operator, cuts)
        )

    def _layout(self, name: str, operand: Operand) -> Layout:
        return layout_of(operand, self.cuts[name], self._ranks)

    def choices(self) -> dict[str, Choice]:
        return {
            name: Choice(
                operator.strategy(self.cuts[name]),
                self.cuts[name],
                tuple(self._layout(name, operand) for operand in operator.inputs),
                self._layout(name, operator.output),
                self._bytes_before(operator, self.cuts[name], in_order=True),
                operator.own_bytes(self.cuts[name]) + operator.exchanged_bytes(self.cuts[name]),
            )
            for name, operator in self.operators.items()
        }


def leaf_layouts(operators: Sequence[Operator], choices: Mapping[str, Choice]) -> dict[str, Layout]:
    """Return the layouts of the tensors that no operator makes: data and parameters.

    A tensor that several operators use has the layout of the first of them. An operator that has
    its output among its inputs changes it in place.
    """
    made = {
        output.tensor
        for operator in operators
        for output in operator.outputs
        if all(operand.tensor != output.tensor for operand in operator.inputs)
    }
    layouts: dict[str, Layout] = {}
    for operator in operators:
        inputs = zip(operator.inputs, choices[operator.name].inputs, strict=True)
        for operand, layout in inputs:
            if operand.tensor not in made:
                layouts.setdefault(operand.tensor, layout)
    return layouts
