"""Operators, and the strategies that cut their inputs among ranks.

An operator has axes. Each dimension of a tensor runs along one axis, or along none where it is
broadcast. A strategy says into how many parts each dimension of each input is cut, and so cuts the
axes; dimensions along one axis are cut alike. MatMul has three:

    X [m, k] x W [k, n] -> Y [m, n]      ((a, b), (b, c)): Y is cut into (a, c), and a partial sum
                                         among b ranks where b > 1
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hvdlite.common.layouts.layout import WHOLE, Layout
from hvdlite.common.layouts.transfer import allreduce_bytes

Strategy = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Operand:
    """A tensor of an operator: its name, its shape, and the axis of each dimension or None.

    `reversed`: strategies list its dimensions from the last to the first, as those of the weight
    of a Linear, which PyTorch holds as [out, in].
    """

    tensor: str
    shape: tuple[int, ...]
    axes: tuple[int | None, ...]
    reversed: bool = False

    def as_listed(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return what belongs to the dimensions in the order of strategies, or back."""
        return tuple(values[::-1] if self.reversed else values)


@dataclass(frozen=True)
class Operator:
    """An operator: its inputs, its output, and the lengths of its axes.

    `uncut` has the axes that no strategy may cut, as an operator needs them whole. A view computes
    nothing, and need not use all ranks: it is cut where that costs no bytes. `exchanged`: an axis
    along which ranks exchange inside of the operator, where it is cut, and how many tensors like
    the result go around; 0: a rank's part of the result comes from all of them. `also`: results
    beside the first one, such as the places of what is sorted. `work`: operations for each
    combination of places along the axes.
    """

    name: str
    inputs: tuple[Operand, ...]
    output: Operand
    lengths: tuple[int, ...]
    uncut: frozenset[int] = frozenset()
    bytes_per_element: int = 4
    is_view: bool = False
    exchanged: tuple[int, int] | None = None
    also: tuple[Operand, ...] = ()
    work: int = 1

    def operations(self, cuts: Sequence[int]) -> int:
        """Return how many operations a rank does forward."""
        return 0 if self.is_view else self.work * math.prod(self.lengths) // math.prod(cuts)

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """All of its results, which are cut along the same axes."""
        return (self.output, *self.also)

    def result(self, tensor: str) -> Operand:
        return next(each for each in self.outputs if each.tensor == tensor)

    @property
    def summed(self) -> tuple[int, ...]:
        """The axes over which the operator sums: cutting one leaves partial sums."""
        return tuple(axis for axis in range(len(self.lengths)) if axis not in self.output.axes)

    def strategy(self, cuts: Sequence[int]) -> Strategy:
        return tuple(
            operand.as_listed([1 if axis is None else cuts[axis] for axis in operand.axes])
            for operand in self.inputs
        )

    def own_bytes(self, cuts: Sequence[int]) -> int:
        """Return what a rank receives while partial sums of the output become sums."""
        parts = math.prod(cuts[axis] for axis in self.summed)
        return allreduce_bytes(math.prod(self._local_output(cuts)) * self.bytes_per_element, parts)

    def exchanged_bytes(self, cuts: Sequence[int]) -> int:
        """Return what a rank receives inside of the operator."""
        if self.exchanged is None:
            return 0
        parts, around = cuts[self.exchanged[0]], self.exchanged[1]
        own = math.prod(self._local_output(cuts)) * self.bytes_per_element
        return own * around * (parts - 1) if around else own * (parts - 1) // parts

    def _local_output(self, cuts: Sequence[int]) -> Iterator[int]:
        for length, axis in zip(self.output.shape, self.output.axes, strict=True):
            yield length if axis is None else length // cuts[axis]


def matmul(
    name: str,
    left: tuple[str, Sequence[int]],
    right: tuple[str, Sequence[int]],
    output: str,
    *,
    transposed: bool = False,
    bytes_per_element: int = 4,
) -> Operator:
    """Return the product of two tensors, given as names and shapes.

    `left` may have more dimensions in front; `right` has two, swapped if `transposed`. Raises
    `ValueError` for shapes that cannot be multiplied.
    """
    (left_name, left_shape), (right_name, right_shape) = left, right
    inner, outer = reversed(right_shape) if transposed else right_shape
    if not left_shape or left_shape[-1] != inner:
        raise ValueError(
            f"{name}: {tuple(left_shape)} and {tuple(right_shape)} cannot be multiplied"
        )
    rows = len(left_shape) - 1
    right_axes = (rows + 1, rows) if transposed else (rows, rows + 1)
    return Operator(
        name,
        (
            Operand(left_name, tuple(left_shape), tuple(range(rows + 1))),
            Operand(right_name, tuple(right_shape), right_axes),
        ),
        Operand(output, (*left_shape[:-1], outer), (*range(rows), rows + 1)),
        (*left_shape, outer),
        bytes_per_element=bytes_per_element,
        work=2,
    )


def elementwise(
    name: str,
    inputs: Sequence[tuple[str, Sequence[int]]],
    output: str,
    *,
    uncut: Sequence[int] = (),
    bytes_per_element: int = 4,
) -> Operator:
    """Return an operator whose inputs are broadcast to the shape of the output.

    `uncut` has the dimensions of the output that it needs whole, as a softmax does. Raises
    `ValueError` for shapes that cannot be broadcast.
    """
    dimensions = max(len(shape) for _, shape in inputs)
    padded = [(1,) * (dimensions - len(shape)) + tuple(shape) for _, shape in inputs]
    full = tuple(max(lengths) if 0 not in lengths else 0 for lengths in zip(*padded, strict=True))
    operands = []
    for (tensor, shape), lengths in zip(inputs, padded, strict=True):
        for length, most in zip(lengths, full, strict=True):
            if length not in (1, most):
                shapes = ", ".join(str(tuple(each)) for _, each in inputs)
                raise ValueError(f"{name}: the shapes {shapes} cannot be broadcast")
        first = dimensions - len(shape)
        axes = [first + i if length == full[first + i] else None for i, length in enumerate(shape)]
        operands.append(Operand(tensor, tuple(shape), tuple(axes)))
    whole_axes = frozenset(axis % dimensions for axis in uncut) if dimensions else frozenset()
    return Operator(
        name,
        tuple(operands),
        Operand(output, full, tuple(range(dimensions))),
        full,
        whole_axes,
        bytes_per_element,
    )


def cuts_of(operator: Operator, strategy: Sequence[Sequence[int]], ranks: int) -> tuple[int, ...]:
    """Return how a strategy that a user gives cuts the axes.

    Raises `TypeError` for what is no tuple of tuples of ints, and `ValueError` for one that does
    not fit the operator, its shapes or the number of ranks.
    """
    check_strategy(strategy, operator.name)
    if len(strategy) != len(operator.inputs):
        raise ValueError(
            f"{operator.name} has {len(operator.inputs)} inputs, and the strategy {strategy} has "
            f"{len(strategy)}"
        )
    cuts = [0] * len(operator.lengths)
    for index, (operand, given) in enumerate(zip(operator.inputs, strategy, strict=True)):
        _cut_axes(operator, index, operand.as_listed(given), cuts, strategy)
    found = tuple(cut or 1 for cut in cuts)
    if ranks % math.prod(found):
        raise ValueError(
            f"{operator.name}: {strategy} makes {math.prod(found)} parts, which do not divide "
            f"{ranks} ranks"
        )
    return found


def _cut_axes(
    operator: Operator, index: int, given: Sequence[int], cuts: list[int], strategy: Any
) -> None:
    """Note in `cuts` how the axes of an input are cut. Raises `ValueError` as `cuts_of`."""
    operand = operator.inputs[index]
    if len(given) != len(operand.shape):
        raise ValueError(
            f"{operator.name}: input {index} has the shape {operand.as_listed(operand.shape)}, and "
            f"the strategy cuts it by {operand.as_listed(given)}"
        )
    for length, axis, parts in zip(operand.shape, operand.axes, given, strict=True):
        if length % parts or (axis is not None and operator.lengths[axis] % parts):
            shown = length if length % parts or axis is None else operator.lengths[axis]
            raise ValueError(
                f"{operator.name}: input {index} of shape {operand.as_listed(operand.shape)} does "
                f"not divide by {operand.as_listed(given)}: {shown} by {parts}"
            )
        if axis is None:
            if parts > 1:
                raise ValueError(
                    f"{operator.name} needs all of a dimension of length {length} of input "
                    f"{index}: {strategy} cuts it by {parts}"
                )
            continue
        if axis in operator.uncut and parts > 1:
            raise ValueError(
                f"{operator.name} needs dimension {axis} whole: {strategy} cuts it by {parts}"
            )
        if cuts[axis] not in (0, parts):
            raise ValueError(
                f"{operator.name}: {strategy} cuts dimensions that belong together by "
                f"{cuts[axis]} and {parts}"
            )
        cuts[axis] = parts


def nearest_strategy(operator: Operator, strategy: Any, ranks: int) -> Strategy:
    """Return the strategy that fits an operator and is most like one that does not.

    Of equally near ones, the one by which more ranks compute: cuts are rather missing than meant
    to be fewer.
    """

    def distance(cuts: tuple[int, ...]) -> tuple[float, int, Strategy]:
        fitting = operator.strategy(cuts)
        try:
            pairs = [
                (int(a), int(b))
                for given, own in zip(strategy, fitting, strict=True)
                for a, b in zip(given[::-1], own[::-1], strict=False)
            ]
            far = sum(abs(math.log(a / b)) for a, b in pairs)
        except (TypeError, ValueError):
            far = 0.0
        return round(far, 9), -math.prod(cuts), fitting

    return min(map(distance, candidates(operator, ranks, False)))[2]


def check_strategy(strategy: object, name: str) -> None:
    """Raise `TypeError` unless `strategy` is a tuple of tuples of ints, `ValueError` below 1."""
    if not isinstance(strategy, tuple) or not all(isinstance(each, tuple) for each in strategy):
        raise TypeError(f"{name}: a strategy is a tuple of tuples, not {strategy!r}")
    for parts in (parts for each in strategy for parts in each):
        if not isinstance(parts, int) or isinstance(parts, bool):
            raise TypeError(f"{name}: a strategy has ints, not {parts!r}")
        if parts < 1:
            raise ValueError(f"{name}: a dimension cannot be cut into {parts} parts")


def layout_of(operand: Operand, cuts: Sequence[int], ranks: int) -> Layout:
    """Return the layout of a tensor of an operator whose axes are cut so."""
    return _layout(operand.axes, tuple(cuts), ranks)


def summed_gradient(operand: Operand, cuts: Sequence[int]) -> tuple[int, ...]:
    """Return the axes along which ranks then have summands of the gradient of the tensor."""
    return tuple(at for at, n in enumerate(cuts) if n > 1 and at not in operand.axes)


@lru_cache(maxsize=1 << 14)
def _layout(axes: tuple[int | None, ...], cuts: tuple[int, ...], ranks: int) -> Layout:
    last = len(cuts) - 1
    entries = [WHOLE if axis is None or cuts[axis] == 1 else last - axis for axis in axes]
    return Layout(cuts or (1,), entries).filled(ranks)


def candidates(operator: Operator, ranks: int, fully_use_devices: bool) -> list[tuple[int, ...]]:
    """Return all ways to cut the axes among the ranks, in rising order.

    With `fully_use_devices` only those that make as many parts as there are ranks; where there are
    none, those that make the most.
    """
    found = _candidates(operator.lengths, operator.uncut, ranks)
    if fully_use_devices:
        most = max(map(math.prod, found))
        return [cuts for cuts in found if math.prod(cuts) == most]
    return found


@lru_cache(maxsize=1 << 12)
def _candidates(
    lengths: tuple[int, ...], uncut: frozenset[int], ranks: int
) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for axis, length in enumerate(lengths):
        divisors = [n for n in range(1, ranks + 1) if ranks % n == 0 and length % n == 0]
        if axis in uncut or not length:
            divisors = [1]
        found = [
            (*cuts, n) for cuts in found for n in divisors if ranks % (math.prod(cuts) * n) == 0
        ]
    return found
