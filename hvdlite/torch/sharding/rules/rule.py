"""What a rule is: the axes of an operator's tensors, and what runs on their parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hvdlite.common.layouts.exchange import along, coordinates_of
from hvdlite.torch.sharding.collectives import Collectives

Axes = tuple[int | None, ...]
# What runs on local tensors: a function, its arguments and its keyword arguments.
Run = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclass
class Site:
    """Where this rank computes: how the axes of an operator are cut, and which parts it has."""

    cuts: Sequence[int]
    matrix: tuple[int, ...]
    collectives: Collectives

    @property
    def coordinates(self) -> Sequence[int]:
        """Which part this rank has along each axis."""
        return coordinates_of(self.matrix, self.collectives.rank)

    def members(self, *axes: int) -> tuple[int, ...]:
        """Return the ranks that have the other parts along these axes."""
        return along(self.matrix, axes, self.collectives.rank)


@dataclass(frozen=True)
class Rule:
    """The axes of each tensor among the arguments, and those of the result.

    `uncut`: axes that stay whole. `is_view`: the operator computes nothing. `complete`: axes that
    the result lacks, and over which the local operator sums among ranks itself. `turned`: inputs
    whose dimensions strategies list from the last one on. `exchanged`: see
    `hvdlite.common.layouts.operators.Operator`. `local`: what runs instead on parts.
    `also`: the axes of further results. `work`: operations for each combination of places along the
    axes.
    """

    inputs: tuple[Axes, ...]
    output: Axes
    lengths: tuple[int, ...]
    uncut: frozenset[int] = frozenset()
    is_view: bool = False
    complete: frozenset[int] = frozenset()
    turned: frozenset[int] = frozenset()
    exchanged: tuple[int, int] | None = None
    local: Callable[[Site, tuple[Any, ...], dict[str, Any]], Run] | None = None
    also: tuple[Axes, ...] = ()
    work: int = 1


Args = Sequence[Any]
Options = Mapping[str, Any]
Maker = Callable[[Any, Args, Options, torch.Tensor], Rule | None]


def tensors_of(args: Args, kwargs: Options) -> list[torch.Tensor]:
    """Return the tensors among arguments, in the order in which strategies number them."""
    leaves = tree_leaves((tuple(args), dict(kwargs)))
    return [each for each in leaves if isinstance(each, torch.Tensor)]


def argument_of(function: Any, args: Args, kwargs: Options, name: str) -> Any:
    """Return an argument by its name in the operator's schema, or its default."""
    for index, argument in enumerate(function._schema.arguments):
        if argument.name == name:
            if index < len(args):
                return args[index]
            return kwargs.get(name, argument.default_value)
    return None
