"""Rules of products of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.torch.sharding.rules.elementwise import broadcast_axes
from hvdlite.torch.sharding.rules.rule import Args, Options, Rule, tensors_of


def matmul(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of a product of two tensors with at least two dimensions each."""
    left, right = (tuple(each.shape) for each in tensors_of(args, kwargs))
    if len(left) < 2 or len(right) < 2:
        return None
    full = tuple(result.shape)
    batch, last = len(full) - 2, len(full)
    before = broadcast_axes(left[:-2], full[:-2]), broadcast_axes(right[:-2], full[:-2])
    assert before[0] is not None and before[1] is not None
    return Rule(
        ((*before[0], batch, last - 1), (*before[1], last - 1, last)),
        (*range(batch), batch, last),
        (*full[:-1], left[-1], full[-1]),
        work=2,
    )


def linear(rows: int, inputs: Sequence[int], weight: Sequence[int]) -> Rule:
    """Return the rule of X [.., in] x W [out, in], whose strategies list W as [in, out]."""
    return Rule(
        (tuple(range(rows + 1)), (rows + 1, rows)),
        (*range(rows), rows + 1),
        (*inputs, weight[0]),
        turned=frozenset([1]),
        work=2,
    )


def einsum(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of a sum of products, whose letters are the axes."""
    spec, tensors = args[0].replace(" ", ""), args[1]
    left, arrow, right = spec.partition("->")
    labels = left.split(",")
    if "." in spec or any(len(set(label)) < len(label) for label in labels):
        return None
    if not arrow:
        right = "".join(sorted(each for each in set(left) - {","} if left.count(each) == 1))
    letters = [*right, *sorted(set(left) - set(right) - {","})]
    lengths = dict.fromkeys(letters, 1)
    for label, tensor in zip(labels, tensors, strict=True):
        for letter, length in zip(label, tensor.shape, strict=True):
            lengths[letter] = max(lengths[letter], length)
    inputs = tuple(
        tuple(
            letters.index(letter) if length == lengths[letter] else None
            for letter, length in zip(label, tensor.shape, strict=True)
        )
        for label, tensor in zip(labels, tensors, strict=True)
    )
    of_letters = tuple(lengths[each] for each in letters)
    return Rule(inputs, tuple(range(len(right))), of_letters, work=2)
