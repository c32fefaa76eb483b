"""Batch normalization over samples that are cut among ranks."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite.torch.autograd import untraced
from hvdlite.torch.sharding.collectives import Collectives


class _Normalized(torch.autograd.Function):
    """Normalizes over the samples of all members; returns mean and variance, too."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: Any,
        bias: Any,
        eps: float,
        members: tuple[int, ...],
        collectives: Collectives,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        exact = inputs.float() if inputs.element_size() < 4 else inputs
        over = [0, *range(2, exact.ndim)]
        variance, mean = torch.var_mean(exact, over, correction=0)
        # Each member's mean and variance, as their sums of squares would lose digits.
        own = torch.cat([mean, variance])
        all_of_them = collectives.allgather(own, members)
        means, variances = all_of_them.view(-1, 2, len(mean)).unbind(1)
        mean = means.mean(0)
        variance = (variances + (means - mean).square()).mean(0)
        along = [1, -1, *[1] * (exact.ndim - 2)]
        scale = (variance + eps).rsqrt()
        normal = (exact - mean.view(along)) * scale.view(along)
        found = normal if weight is None else normal * weight.to(normal.dtype).view(along)
        if bias is not None:
            found = found + bias.to(normal.dtype).view(along)
        ctx.save_for_backward(normal, scale, weight)
        ctx.members, ctx.collectives = members, collectives
        ctx.types = [getattr(each, "dtype", None) for each in (weight, bias)]
        ctx.mark_non_differentiable(mean, variance)
        return found.to(inputs.dtype), mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        normal, scale, weight = ctx.saved_tensors
        of_weight, of_bias = ctx.types
        gradient = gradients[0].to(normal.dtype)
        over, along = [0, *range(2, normal.ndim)], [1, -1, *[1] * (normal.ndim - 2)]
        sums = torch.cat([gradient.sum(over), (gradient * normal).sum(over)])
        count = normal.numel() // len(scale) * len(ctx.members)
        totals = ctx.collectives.allreduce(sums, ctx.members)
        mean, slope = (totals.view(2, *along) / count).unbind()
        factor = scale if weight is None else scale * weight.to(scale.dtype)
        found = (gradient - mean - normal * slope) * factor.view(along)
        bias, weights = sums.chunk(2)
        return (
            found.to(gradients[0].dtype),
            None if of_weight is None else weights.to(of_weight),
            None if of_bias is None else bias.to(of_bias),
            None, None, None,
        )  # fmt: skip


@untraced
def batch_norm(
    inputs: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_variance: torch.Tensor | None,
    momentum: float,
    eps: float,
    members: tuple[int, ...],
    collectives: Collectives,
) -> torch.Tensor:
    """Return what is normalized by the statistics of all samples, and update running ones.

    `members` have the other samples, of equal number, for the same channels.
    """
    found, mean, variance = _Normalized.apply(  # type: ignore[no-untyped-call]
        inputs, weight, bias, eps, members, collectives
    )
    count = inputs.numel() // len(mean) * len(members)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_variance is not None:
            unbiased = (variance * (count / max(count - 1, 1))).to(running_variance.dtype)
            running_variance.lerp_(unbiased, momentum)
    normalized: torch.Tensor = found
    return normalized
