"""Rules of operators that compute nothing: other shapes and orders, parts of tensors, joins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hvdlite.torch.sharding.rules import attention
from hvdlite.torch.sharding.rules.elementwise import broadcast_axes
from hvdlite.torch.sharding.rules.rule import (
    Args,
    Axes,
    Maker,
    Options,
    Rule,
    Run,
    Site,
    argument_of,
    tensors_of,
)  # fmt: skip


def strided(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of a view by strides, found with a tensor whose strides all differ."""
    shape = tuple(args[0].shape)
    strides = [math.prod(n + 1 for n in shape[i + 1 :]) for i in range(len(shape))]
    probe = torch.empty_strided(shape, strides, device="meta")
    others = [each.to("meta") if isinstance(each, torch.Tensor) else each for each in args[1:]]
    found = function(probe, *others, **kwargs)
    axes: list[int | None] = [None] * len(shape)
    output: list[int | None] = [None] * found.ndim
    lengths: list[int] = []
    for dim, (length, stride) in enumerate(zip(found.shape, found.stride(), strict=True)):
        if length > 1 and stride in strides and shape[strides.index(stride)] == length:
            axes[strides.index(stride)] = output[dim] = len(lengths)
            lengths.append(length)
    return Rule(
        (tuple(axes), *[(None,) * each.ndim for each in tensors_of(args[1:], kwargs)]),
        tuple(output),
        tuple(lengths),
        is_view=True,
    )


def expand(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of a view that repeats dimensions of length 1."""
    rule = strided(torch.ops.aten.expand.default, (args[0], result.shape), {}, result)
    return _by_shape(rule, torch.ops.aten.expand.default, result, len(tensors_of(args, kwargs)))


def sliced(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of a slice, which needs its dimension whole unless it takes all of it."""
    rule = strided(function, args, kwargs, result)
    if rule is not None and tuple(args[0].shape) == tuple(result.shape):

        def local(site: Site, given: tuple[Any, ...], options: dict[str, Any]) -> Run:
            return torch.ops.aten.alias.default, (given[0],), {}

        return replace(rule, local=local)
    return rule


def _by_shape(rule: Rule | None, target: Any, result: torch.Tensor, tensors: int) -> Rule | None:
    """Return a rule whose operator is told the shape of its local result."""
    if rule is None:
        return None
    shape, output = tuple(result.shape), rule.output

    def local(site: Site, given: tuple[Any, ...], options: dict[str, Any]) -> Run:
        sizes = [
            n if axis is None else n // site.cuts[axis]
            for n, axis in zip(shape, output, strict=True)
        ]
        return target, (given[0], sizes), {}

    if tensors > 1:  # The others give their shapes alone.
        return None
    return replace(rule, local=local)


def reshape(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of a view by another shape: the first dimensions of parts are cut alike."""
    if function._overloadname == "dtype":
        return None
    before, after = tuple(args[0].shape), tuple(result.shape)
    inputs: list[int | None] = [None] * len(before)
    output: list[int | None] = [None] * len(after)
    lengths: list[int] = []
    for first, second in _same_products(before, after):
        long = [dim for dim in first if before[dim] > 1], [dim for dim in second if after[dim] > 1]
        if all(long):
            inputs[long[0][0]] = output[long[1][0]] = len(lengths)
            lengths.append(math.gcd(before[long[0][0]], after[long[1][0]]))
    rule = Rule((tuple(inputs),), tuple(output), tuple(lengths), is_view=True)
    target = torch.ops.aten.reshape.default
    return _by_shape(rule, target, result, len(tensors_of(args, kwargs)))


def _same_products(
    before: Sequence[int], after: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """Return the runs of dimensions of two shapes that have as many elements."""
    if 0 in before:
        return []
    found = []
    i = j = 0
    while i < len(before) and j < len(after):
        first, second = [i], [j]
        one, other = before[i], after[j]
        while one != other:
            if one < other:
                i += 1
                one *= before[i]
                first.append(i)
            else:
                j += 1
                other *= after[j]
                second.append(j)
        found.append((first, second))
        i, j = i + 1, j + 1
    return found


def joined(is_new: bool) -> Maker:
    """Return the rule of `cat`, or of `stack` where the dimension is new."""

    def make(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
        dim = int(argument_of(function, args, kwargs, "dim") or 0) % result.ndim
        if any(each.ndim != result.ndim - is_new for each in args[0]):
            return None  # cat() takes an empty tensor of one dimension beside others.
        output: list[int | None] = list(range(result.ndim))
        output[dim] = None
        one = [axis for axis in output if axis is not None] if is_new else output
        return Rule((tuple(one),) * len(args[0]), tuple(output), tuple(result.shape))

    return make


def repeat_interleave(
    function: Any, args: Args, kwargs: Options, result: torch.Tensor
) -> Rule | None:
    """Return the rule of elements that are repeated beside each other."""
    dim = argument_of(function, args, kwargs, "dim")
    if function._overloadname != "self_int" or dim is None:
        return None
    axes = tuple(range(result.ndim))

    def local(site: Site, given: tuple[Any, ...], options: dict[str, Any]) -> Run:
        # The length of the whole result, which follows from the others.
        left = {name: each for name, each in options.items() if name != "output_size"}
        return function, given, left

    return Rule((axes,), axes, tuple(args[0].shape), local=local)


def with_tensors(index: Any) -> Any:
    """Return an index whose lists are tensors with values, as other operators see.

    torch would make them on the device of what is indexed, which has no values in a trace.
    """
    if isinstance(index, tuple):
        return tuple(_as_tensor(each) for each in index)
    # torch takes other lists for tuples in some versions.
    if isinstance(index, list) and not all(isinstance(each, (bool, int)) for each in index):
        return index
    return _as_tensor(index)


def _as_tensor(index: Any) -> Any:
    if not isinstance(index, (list, tuple, range, np.ndarray)):
        return index
    values = index.tolist() if isinstance(index, np.ndarray) else index
    return torch.tensor(values, dtype=None if len(values) else torch.int64)


def chosen(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of `index_select`, which needs one dimension whole."""
    if not args[0].ndim:
        return None
    dim = args[1] % args[0].ndim
    axes = tuple(None if each == dim else each for each in range(args[0].ndim))
    return Rule((axes, (None,)), axes, tuple(args[0].shape))


def complex_view(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of a view of pairs as complex numbers, or back."""
    dims = min(args[0].ndim, result.ndim)
    axes = tuple(range(dims))
    shape = tuple(args[0].shape)[:dims]
    source, target = ((*axes, None)[: each.ndim] for each in (args[0], result))
    return Rule((source,), target, shape, is_view=True)


def indexed(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of elements at places that other tensors say, which may be cut themselves."""
    shape = tuple(args[0].shape)
    places = [place for place, each in enumerate(args[1]) if each is not None]
    given = [tuple(args[1][place].shape) for place in places]
    chosen = tuple(torch.broadcast_shapes(*given))  # type: ignore[no-untyped-call]
    together = places == list(range(places[0], places[-1] + 1))
    first = places[0] if together else 0
    kept = [dim for dim in range(len(shape)) if dim not in places]
    axes: list[int | None] = [None] * len(shape)
    for number, dim in enumerate(kept):
        axes[dim] = number if number < first else number + len(chosen)
    inputs: list[Axes] = [tuple(axes)]
    for each in given:
        of_chosen = broadcast_axes(each, chosen) or ()
        inputs.append(tuple(None if axis is None else first + axis for axis in of_chosen))
    return Rule(tuple(inputs), tuple(range(result.ndim)), tuple(result.shape))


def gathered(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of elements along one dimension, which their source has whole."""
    source, places = tuple(args[0].shape), tuple(result.shape)
    if not places:
        return None
    dim = args[1] % len(places)
    alike = [n == source[axis] or axis == dim for axis, n in enumerate(places)]
    axes = tuple(axis if same else None for axis, same in enumerate(alike))
    of_source = tuple(None if axis == dim else axis for axis in axes)
    return Rule((of_source, axes), axes, places)


def scattered(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of elements that are put at places along one dimension, which is whole."""
    tensors = tensors_of(args, kwargs)
    if function._overloadname not in ("src", "value") or not result.ndim:
        return None
    dim, shape = args[1] % result.ndim, tuple(result.shape)
    axes = tuple(
        None if axis == dim or any(each.shape[axis] != n for each in tensors) else axis
        for axis, n in enumerate(shape)
    )
    return Rule((axes,) * len(tensors), axes, shape)


def copied(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of slices that are put at places along one dimension, which is whole."""
    if not result.ndim:
        return None
    dim = args[1] % result.ndim
    axes = tuple(None if axis == dim else axis for axis in range(result.ndim))
    return Rule((axes, (None,), axes), axes, tuple(result.shape))


def rows_apart(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule:
    """Return the rule of rows as parts in a new dimension, of each of which a rank has some."""
    axes = tuple(range(result.ndim - 1))
    parts = int(args[1])

    def local(site: Site, given: tuple[Any, ...], options: dict[str, Any]) -> Run:
        if site.cuts[0] == 1:
            rest = [n // cut for n, cut in zip(result.shape[1:], site.cuts, strict=True)]
            return torch.ops.aten.reshape.default, (given[0], [parts, *rest]), {}
        rows = attention.Rows(site.members(0), site.coordinates[0], site.collectives)
        return attention.rows_of_ranks_apart, (given[0], parts, rows), {}

    return Rule(
        (axes,), (None, *axes), tuple(result.shape[1:]), is_view=True, exchanged=(0, 0), local=local
    )
