"""Operators that are another computation on a part than on the whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.torch.sharding.collectives import Collectives


def divided(function: Callable[..., Any], parts: int, *args: Any, **kwargs: Any) -> Any:
    """Return what a function does, divided by the number of parts whose results are added."""
    result = function(*args, **kwargs)
    return result if parts == 1 else result / parts


def scaled_sum(
    addend: torch.Tensor, product: torch.Tensor, beta: float, alpha: float
) -> torch.Tensor:
    """Return ``beta * addend + alpha * product``; a beta of 0 ignores the addend."""
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product.clone()
    return product + (addend if beta == 1 else addend * beta)


def add_along(tensor: torch.Tensor, values: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the sum with a vector that runs along a dimension."""
    return tensor + values.view(-1, *[1] * (tensor.ndim - 1 - dim))


def embedding_of_rows(
    weight: torch.Tensor, words: torch.Tensor, first: int, padding: int
) -> torch.Tensor:
    """Return the rows that this rank has, of which `first` is the first, and zeros for others."""
    own = words - first
    elsewhere = (own < 0) | (own >= weight.shape[0])
    at = padding - first if 0 <= padding - first < weight.shape[0] else -1
    found = torch.nn.functional.embedding(
        own.masked_fill(elsewhere, 0), weight, at if at >= 0 else None
    )
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)


@dataclass(frozen=True)
class Classes:
    """The classes that this rank has, from `first` on, and who has the others.

    `others` have other classes of the same samples, `samples` the same classes of other samples.
    """

    first: int
    others: tuple[int, ...]
    samples: tuple[int, ...]
    collectives: Collectives

    def __post_init__(self) -> None:
        for members in (self.others, self.samples):
            if len(members) > 1:
                self.collectives.join(members)

    def over_classes(self, tensor: torch.Tensor, maximum: bool = False) -> torch.Tensor:
        """Return the sum or maximum over all classes."""
        if len(self.others) == 1:
            return tensor
        return self.collectives.allreduce(tensor, self.others, maximum)

    def over_samples(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all samples."""
        return (
            tensor if len(self.samples) == 1 else self.collectives.allreduce(tensor, self.samples)
        )


class _Losses(torch.autograd.Function):
    """The cross entropy of each sample; no rank has the logits of all classes."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, ignored: int, classes: Classes
    ) -> torch.Tensor:
        exact = logits.float() if logits.element_size() < 4 else logits
        largest = classes.over_classes(exact.amax(1), maximum=True)
        powers = (exact - largest[:, None]).exp()
        sums = classes.over_classes(powers.sum(1))
        own = target - classes.first
        here = (own >= 0) & (own < logits.shape[1]) & (target != ignored)
        own = own.masked_fill(~here, 0)[:, None]
        picked = classes.over_classes(exact.gather(1, own)[:, 0].masked_fill(~here, 0))
        losses = (sums.log() + largest - picked).masked_fill(target == ignored, 0)
        ctx.save_for_backward(powers.div_(sums[:, None]), own, here, target != ignored)
        return losses.to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None, None]:
        shares, own, here, counted = ctx.saved_tensors
        found = shares.scatter_add(1, own, -here.to(shares.dtype)[:, None])
        scale = (gradients[0] * counted)[:, None]
        return (found * scale).to(gradients[0].dtype), None, None, None


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, reduction: int, ignored: int, classes: Classes
) -> torch.Tensor:
    """Return the losses, or this rank's summand of their sum or mean."""
    losses: torch.Tensor = _Losses.apply(  # type: ignore[no-untyped-call]
        logits, target, ignored, classes
    )
    if reduction == 0:
        return losses
    total = losses.sum()
    if reduction == 2:
        return total
    return total / classes.over_samples((target != ignored).sum())


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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the operator draws for this part; the user's generators stay as they are."""
        used = {each.device for each in args if isinstance(each, torch.Tensor) and each.is_cuda}
        with _GENERATORS, torch.random.fork_rng(used):
            torch.manual_seed(hash((self._seed.value, *self._place)) % 2**62)
            return self._function(*args, **kwargs)
