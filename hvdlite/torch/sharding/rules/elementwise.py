"""Rules of operators on elements: with broadcasting, along a dimension, and reductions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.torch.sharding.rules import pieces
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


def pointwise(
    function: Any, args: Args, kwargs: Options, result: torch.Tensor, uncut: Sequence[int] = ()
) -> Rule | None:
    """Return the rule of an operator whose inputs are broadcast to the shape of its result."""
    shapes = [tuple(each.shape) for each in tensors_of(args, kwargs)]
    full = tuple(result.shape)
    axes = [broadcast_axes(shape, full) for shape in shapes]
    if any(each is None for each in axes):
        return None
    whole = frozenset(axis % len(full) for axis in uncut) if full else frozenset()
    inputs = tuple(each for each in axes if each is not None)
    return Rule(inputs, tuple(range(len(full))), full, whole)


def broadcast_axes(shape: Sequence[int], full: Sequence[int]) -> Axes | None:
    """Return the axes of a tensor that is broadcast to a shape; None if it cannot be."""
    first = len(full) - len(shape)
    if first < 0 or any(n not in (1, full[first + i]) for i, n in enumerate(shape)):
        return None
    return tuple(first + i if n == full[first + i] else None for i, n in enumerate(shape))


def along(argument: str) -> Maker:
    """Return the rule of a pointwise operator that needs the dimensions of an argument whole."""

    def make(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
        dims = argument_of(function, args, kwargs, argument)
        if dims is None or dims == []:  # All dimensions as one, such as of `roll` without dims.
            return None
        uncut = (dims,) if isinstance(dims, int) else tuple(dims)
        return pointwise(function, args, kwargs, result, uncut)

    return make


def beside(
    function: Any, args: Args, kwargs: Options, result: torch.Tensor | Sequence[torch.Tensor]
) -> Rule | None:
    """Return the rule of an operator that looks along a dimension, or some, and at none beside.

    What it finds there has the dimension, whole and maybe of another length, or lacks it.
    """
    if function._overloadname == "other":  # The larger of two tensors.
        assert isinstance(result, torch.Tensor)
        return pointwise(function, args, kwargs, result)
    shape = tuple(args[0].shape)
    given = argument_of(function, args, kwargs, "dim")
    dims = [given] if isinstance(given, int) else given
    if not shape or not dims or not all(isinstance(dim, int) for dim in dims):
        return None  # All elements in a row, or dimensions by names.
    along = {dim % len(shape) for dim in dims}
    axes = tuple(None if dim in along else dim for dim in range(len(shape)))
    without = tuple(dim for dim in range(len(shape)) if dim not in along)
    results = [result] if isinstance(result, torch.Tensor) else result
    first, *others = (axes if each.ndim == len(shape) else without for each in results)
    return Rule((axes,), first, shape, also=tuple(others))


def reduction(summed: bool) -> Maker:
    """Return the rule of a reduction: of a sum or mean, whose parts add up, or of another one."""

    def make(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
        shape = tuple(args[0].shape)
        given = argument_of(function, args, kwargs, "dim")
        if given is None or given == []:
            given = range(len(shape))
        # A tensor without dimensions may be reduced along 0 or -1, which are none.
        dims = {dim % len(shape) for dim in ([given] if isinstance(given, int) else given) if shape}
        keeps = result.ndim == len(shape)
        output: list[int | None] = []
        for dim in range(len(shape)):
            if dim not in dims:
                output.append(dim)
            elif keeps:
                output.append(None)
        axes = tuple(dim if summed or dim not in dims else None for dim in range(len(shape)))
        is_mean = function._schema.name == "aten::mean"

        def local(site: Site, given: tuple[Any, ...], options: dict[str, Any]) -> Run:
            parts = math.prod(site.cuts[dim] for dim in dims) if is_mean else 1
            return pieces.divided, (function, parts, *given), options

        return Rule((axes,), tuple(output), shape, local=local if is_mean else None)

    return make


def mean_of_pairs(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of a loss that compares two tensors element by element."""
    shape = tuple(args[0].shape)
    reduction = argument_of(function, args, kwargs, "reduction")
    if tuple(args[1].shape) != shape:
        return None
    axes = tuple(range(len(shape)))

    def local(site: Site, given: tuple[Any, ...], options: dict[str, Any]) -> Run:
        parts = math.prod(site.cuts) if reduction == 1 else 1
        return pieces.divided, (function, parts, *given), options

    return Rule((axes, axes), axes if reduction == 0 else (), shape, local=local)


def half(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of an operator that halves a dimension, which it needs whole."""
    dim = int(argument_of(function, args, kwargs, "dim")) % result.ndim
    axes = tuple(None if each == dim else each for each in range(result.ndim))
    return Rule((axes,), axes, tuple(result.shape))


def prelu(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of a ReLU with a slope for each channel."""
    axes = tuple(range(result.ndim))
    one: Axes = (None,) if args[1].numel() == 1 else (1,)
    return Rule((axes, one if args[1].ndim else ()), axes, tuple(result.shape))
