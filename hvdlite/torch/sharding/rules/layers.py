"""Rules of operators of neural networks: norms, embeddings, losses, attention."""

from __future__ import annotations

import math
from typing import Any

import torch

from hvdlite.torch.sharding.rules import losses, pieces, ring
from hvdlite.torch.sharding.rules.elementwise import broadcast_axes, pointwise
from hvdlite.torch.sharding.rules.rule import (
    Args,
    Axes,
    Options,
    Rule,
    Run,
    Site,
    argument_of,
    tensors_of,
)  # fmt: skip


def normalized(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of a norm over the last dimensions, which it needs whole."""
    return pointwise(function, args, kwargs, result, range(-len(args[1]), 0))


def group_norm(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of a norm over groups of channels, which are cut by groups."""
    groups, shape = int(args[1]), tuple(result.shape)
    tensors = tensors_of(args, kwargs)
    inputs: tuple[Axes, ...] = ((0, 1, *[None] * (len(shape) - 2)), *[(1,)] * (len(tensors) - 1))

    def local(site: Site, given: tuple[Any, ...], options: dict[str, Any]) -> Run:
        return function, (given[0], groups // site.cuts[1], *given[2:]), options

    return Rule(inputs, inputs[0], (shape[0], groups), local=local)


def embedding(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of a lookup in a table that is cut by rows or columns.

    The gradient of the table is no sparse one, as it is a DTensor.
    """
    (rows, width), words = args[0].shape, tuple(args[1].shape)
    padding = argument_of(function, args, kwargs, "padding_idx")
    if argument_of(function, args, kwargs, "scale_grad_by_freq"):
        return None
    at = len(words)

    def local(site: Site, given: tuple[Any, ...], options: dict[str, Any]) -> Run:
        if site.cuts[at] == 1:
            return function, (given[0], given[1], int(padding)), {}
        first = rows // site.cuts[at] * site.coordinates[at]
        return pieces.embedding_of_rows, (given[0], given[1], first, int(padding), rows), {}

    axes = tuple(range(at))
    return Rule(((at, at + 1), axes), (*axes, at + 1), (*words, rows, width), local=local, work=0)


def cross_entropy(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of a loss whose classes may be cut."""
    logits, target = args[0], args[1]
    if logits.ndim < 2 or target.ndim != logits.ndim - 1:
        return None  # One sample, or shares of all classes in place of one of them.
    reduction, ignored, smoothing, weight = (
        argument_of(function, args, kwargs, name)
        for name in ("reduction", "ignore_index", "label_smoothing", "weight")
    )
    axes: Axes = tuple(range(logits.ndim))
    of_target: Axes = (0, *axes[2:])

    def local(site: Site, given: tuple[Any, ...], options: dict[str, Any]) -> Run:
        told = losses.CrossEntropy(
            int(reduction), int(ignored), float(smoothing or 0),
            logits.shape[1] // site.cuts[1] * site.coordinates[1], site.members(1),
            site.members(0, *range(2, logits.ndim)), site.collectives,
        )  # fmt: skip
        weights = given[2] if len(given) > 2 else None
        return losses.cross_entropy, (given[0], given[1], weights, told), {}

    return Rule(
        (axes, of_target, *([] if weight is None else [(1,)])),
        of_target if reduction == 0 else (),
        tuple(logits.shape),
        complete=frozenset([1]),
        local=local,
    )


def attention(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of attention that is cut by batch, heads and words.

    Where words see words of the same sequence, keys and values are cut as queries are, and passed
    around a ring; with dropout, or of another sequence, only queries are cut.
    """
    query, key, value = (tuple(each.shape) for each in args[:3])
    mask = argument_of(function, args, kwargs, "attn_mask")
    causal = argument_of(function, args, kwargs, "is_causal")
    full = tuple(result.shape)
    batch = len(full) - 2
    lengths = list(full[:-2])
    around = query[:-1] == key[:-1] == value[:-1] and not argument_of(
        function, args, kwargs, "dropout_p"
    )
    inputs: list[Axes] = []
    for shape in (query, key, value):
        axes: list[int | None] = []
        for dim, length in enumerate(shape[:-2]):
            if length == full[dim]:
                axes.append(dim)
            elif dim == batch - 1 and length > 1 and full[dim] % length == 0:
                axes.append(dim)  # Some heads of queries share one of keys and values.
                lengths[dim] = math.gcd(lengths[dim], length)
            else:
                axes.append(None)
        inputs.append((*axes, batch if around or not inputs else None, None))
    output: Axes = (*range(batch), batch, None)
    if mask is not None:
        of_mask = broadcast_axes(tuple(mask.shape), (*full[:-1], key[-2]))
        if of_mask is None:
            return None
        inputs.append((*of_mask[:-1], None))
    work = 2 * key[-2] * (query[-1] + value[-1]) * math.prod(full[:-2]) // math.prod(lengths)
    if not around:
        uncut = frozenset([batch]) if causal else frozenset()
        return Rule(tuple(inputs), output, (*lengths, full[-2]), uncut, work=work)
    scale = argument_of(function, args, kwargs, "scale")

    def local(site: Site, given: tuple[Any, ...], options: dict[str, Any]) -> Run:
        if site.cuts[batch] == 1:
            return function, given, options
        of_words = ring.Ring(site.members(batch), site.coordinates[batch], site.collectives)
        of_mask = given[3] if len(given) > 3 else options.get("attn_mask")
        return ring.attention, (*given[:3], of_mask, scale, bool(causal), of_words), {}

    return Rule(
        tuple(inputs), output, (*lengths, full[-2]), exchanged=(batch, 2), local=local, work=work
    )
