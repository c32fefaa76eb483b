"""Operators that are another computation on a part than on the whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.torch.autograd import untraced


def divided(function: Callable[..., Any], parts: int, *args: Any, **kwargs: Any) -> Any:
    """Return what a function does, divided by the number of parts whose results are added."""
    result = function(*args, **kwargs)
    return result if parts == 1 else result / parts


def without_gradients(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a function does while gradients are switched off."""
    with torch.no_grad():
        return function(*args, **kwargs)


def with_autocast(
    states: Sequence[tuple[str, bool, torch.dtype]],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return what a function does where autocast is set so for these kinds of devices."""
    with ExitStack() as stack:
        for kind, enabled, dtype in states:
            stack.enter_context(torch.autocast(kind, dtype, enabled))
        return function(*args, **kwargs)


def scaled_sum(
    addend: torch.Tensor, product: torch.Tensor, beta: float, alpha: float
) -> torch.Tensor:
    """Return ``beta * addend + alpha * product``; a beta of 0 ignores the addend."""
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product.clone()
    return product + (addend if beta == 1 else addend * beta)


def add_along(tensor: torch.Tensor, values: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the sum with a vector along a dimension, in the dtype that autocast may have made."""
    return tensor + values.to(tensor.dtype).view(-1, *[1] * (tensor.ndim - 1 - dim))


def no_rank_has(absent: torch.Tensor) -> bool:
    """Return whether there is something that no rank has, where the answer costs nothing.

    On a device it would have to be waited for: the results are NaN then.
    """
    return absent.device.type == "cpu" and bool(absent.any())


def embedding_of_rows(
    weight: torch.Tensor, words: torch.Tensor, first: int, padding: int, rows: int
) -> torch.Tensor:
    """Return those of all rows that this rank has, from `first` on, and zeros for others."""
    absent = (words < 0) | (words >= rows)
    if no_rank_has(absent):
        raise IndexError(f"word {int(words[absent][0])} is none of an embedding of {rows} rows")
    own = words - first
    elsewhere = (own < 0) | (own >= weight.shape[0])
    at = padding - first if 0 <= padding - first < weight.shape[0] else -1
    found = torch.nn.functional.embedding(
        own.masked_fill(elsewhere, 0), weight, at if at >= 0 else None
    )
    found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
    return (
        found if found.device.type == "cpu" else found.masked_fill(absent.unsqueeze(-1), torch.nan)
    )


# Random numbers: ranks with the same part draw the same ones, others draw others.


@dataclass
class Seed:
    """The number that the draws of one call start from, which all ranks have."""

    value: int = 0


# Guards torch's generators, which all threads share, while one is seeded for a draw.
_GENERATORS = threading.Lock()


class Draw:
    """An operator that draws random numbers for one part of its result, as the `number`-th draw."""

    def __init__(self, function: Callable[..., Any], seed: Seed, number: int, part: int) -> None:
        self._function = function
        self._seed = seed
        self._place = (number, part)

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the operator draws for this part; the user's generators stay as they are."""
        used = {each.device for each in args if isinstance(each, torch.Tensor) and each.is_cuda}
        with _GENERATORS, torch.random.fork_rng(used):
            torch.manual_seed(hash((self._seed.value, *self._place)) % 2**62)
            return self._function(*args, **kwargs)
