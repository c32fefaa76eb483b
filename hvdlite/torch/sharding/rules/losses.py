"""Cross entropies of which the classes are cut among ranks: none has the logits of all classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.torch.autograd import untraced
from hvdlite.torch.sharding.collectives import Collectives
from hvdlite.torch.sharding.rules.pieces import no_rank_has


@dataclass(frozen=True)
class CrossEntropy:
    """What a cross entropy is told: torch's number of the reduction, and whose target counts not.

    `smoothing` is the share of a target that all classes have alike. This rank has the classes from
    `first` on; `others` have other ones of the same samples, `samples` those of other samples.
    """

    reduction: int
    ignored: int
    smoothing: float
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


class _Losses(torch.autograd.Function):
    """The cross entropy of each sample, and the weight of its target."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, weight: Any, told: CrossEntropy
    ) -> tuple[torch.Tensor, torch.Tensor]:
        smoothing = told.smoothing
        exact = logits.float() if logits.element_size() < 4 else logits
        largest = told.over_classes(exact.amax(1), maximum=True)
        powers = (exact - largest[:, None]).exp()
        counted = target != told.ignored
        ends = logits.shape[1] * len(told.others)
        absent = counted & ((target < 0) | (target >= ends))
        if no_rank_has(absent):
            raise IndexError(f"Target {int(target[absent][0])} is out of bounds.")
        own = target - told.first
        here = (own >= 0) & (own < logits.shape[1]) & counted
        own = own.masked_fill(~here, 0)
        # What ranks know of each sample, summed over the classes by one collective.
        known = [powers.sum(1), exact.gather(1, own[:, None])[:, 0].masked_fill(~here, 0)]
        weights = exact.new_ones(logits.shape[1]) if weight is None else weight.to(exact.dtype)
        if weight is not None:
            known += [weights[own].masked_fill(~here, 0), weights.sum().expand(len(target))]
        if smoothing:
            known.append(exact @ weights)
        sums, picked, *others = told.over_classes(torch.stack(known)).unbind()
        of_target: Any = counted.to(exact.dtype)
        of_all: Any = ends
        if weight is not None:
            of_target, of_all, *others = others
        largest = sums.log() + largest
        losses = (1 - smoothing) * of_target * (largest - picked)
        scale = (1 - smoothing) * of_target
        if smoothing:
            share = smoothing / ends
            losses = losses + share * (of_all * largest - others[0])
            ctx.smooth = share * weights
            scale = scale + share * of_all
        ctx.save_for_backward(powers.div_(sums[:, None]), own, here, counted, of_target, scale)
        ctx.told = told
        ctx.mark_non_differentiable(of_target)
        losses = losses.masked_fill(absent, torch.nan)
        return losses.masked_fill(~counted, 0).to(logits.dtype), of_target

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None, None]:
        shares, own, here, counted, of_target, scale = ctx.saved_tensors
        smoothing = ctx.told.smoothing
        of_own = (smoothing - 1) * of_target * here
        found = (shares * scale[:, None]).scatter_add(1, own[:, None], of_own[:, None])
        if smoothing:
            found = found - ctx.smooth
        found = found * (gradients[0] * counted)[:, None]
        return found.to(gradients[0].dtype), None, None, None


@untraced
def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, told: CrossEntropy
) -> torch.Tensor:
    """Return the losses, or this rank's summand of their sum or mean."""
    shape = target.shape
    if torch.is_autocast_enabled(logits.device.type) and logits.element_size() < 4:
        logits = logits.float()  # As torch does with its own.
    if logits.ndim > 2:
        logits, target = logits.movedim(1, -1).flatten(0, -2), target.flatten()
    losses, of_target = _Losses.apply(  # type: ignore[no-untyped-call]
        logits, target, weight, told
    )
    if told.reduction == 0:
        each: torch.Tensor = losses.view(shape)
        return each
    total: torch.Tensor = losses.sum()
    if told.reduction == 2:
        return total
    count = of_target.sum()
    if len(told.samples) > 1:
        count = told.collectives.allreduce(count, told.samples)
    mean: torch.Tensor = total / count
    return mean.to(logits.dtype)
