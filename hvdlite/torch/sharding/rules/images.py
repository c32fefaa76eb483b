"""Rules of operators on images: convolutions, pooling, padding, norms over batches.

They are cut by samples and by channels. Height and width stay whole, as each part would need the
edges of its neighbours; `hvdlite.torch.SpatialConv2d` is for images that are too large for a rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hvdlite.torch.sharding.rules import batches
from hvdlite.torch.sharding.rules.rule import (
    Args,
    Axes,
    Options,
    Rule,
    Run,
    Site,
    argument_of,
    tensors_of,
)


def convolution(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule:
    """Return the rule of X [n, in, ..] and W [out, in, ..], or of groups of channels.

    A transposed one has W [in, out, ..]. Groups of channels are cut alike before and after.
    """
    inputs = args[0]
    groups = int(argument_of(function, args, kwargs, "groups") or 1)
    space = (None,) * (inputs.ndim - 2)
    work = 2 * math.prod(args[1].shape[2:]) * math.prod(result.shape[2:])
    if groups == 1:
        of_weight = (1, 2) if "transpose" in function._schema.name else (2, 1)
        lengths = (inputs.shape[0], inputs.shape[1], result.shape[1])
        return Rule(((0, 1, *space), (*of_weight, *space)), (0, 2, *space), lengths, work=work)
    place = [each.name for each in function._schema.arguments].index("groups")

    def local(site: Site, given: tuple[Any, ...], options: dict[str, Any]) -> Run:
        return function, (*given[:place], groups // site.cuts[1], *given[place + 1 :]), options

    return Rule(
        ((0, 1, *space), (1, None, *space)),
        (0, 1, *space),
        (inputs.shape[0], groups),
        local=local,
        work=work * inputs.shape[1] * result.shape[1] // groups**2,
    )


def pooling(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of an operator that needs the last dimensions whole, as its name counts."""
    leading = result.ndim - int(function._schema.name[-2])
    axes: Axes = (*range(leading), *[None] * (result.ndim - leading))
    return Rule((axes,), axes, tuple(result.shape[:leading]))


def padding(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of padding, which needs the dimensions whole that it makes longer."""
    pairs = list(zip(args[1][::2], args[1][1::2], strict=True))  # From the last dimension on.
    padded = {result.ndim - 1 - index for index, pair in enumerate(pairs) if any(pair)}
    axes = tuple(None if axis in padded else axis for axis in range(result.ndim))
    return Rule((axes,), axes, tuple(result.shape))


def batch_norm(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of a norm over all samples, which are cut: ranks add up what they see."""
    shape = tuple(result.shape)
    axes = tuple(range(len(shape)))
    training = args[5]

    def local(site: Site, given: tuple[Any, ...], options: dict[str, Any]) -> Run:
        over = [axis for axis in axes if axis != 1]
        if not training or math.prod(site.cuts[axis] for axis in over) == 1:
            return function, given, options
        members = site.members(*over)
        site.collectives.join(members)
        options_of_norm = float(given[6]), float(given[7]), members, site.collectives
        return batches.batch_norm, (*given[:5], *options_of_norm), {}

    channels = len(tensors_of(args, kwargs)) - 1
    return Rule((axes, *[(1,)] * channels), axes, shape, local=local)


def instance_norm(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of a norm over each channel of each sample."""
    if args[3] is not None:
        return None  # Its running statistics are averages over samples.
    axes: Axes = (0, 1, *[None] * (result.ndim - 2))
    channels = len(tensors_of(args, kwargs)) - 1
    return Rule((axes, *[(1,)] * channels), axes, tuple(result.shape[:2]))
