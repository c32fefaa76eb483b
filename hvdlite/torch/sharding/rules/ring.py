"""Attention over a sequence that is cut: keys and values are passed around a ring of ranks.

Each rank has the queries of its words, and sees one rank's keys and values after the other. It
keeps the largest score of each query and the sum of the powers, by which what was seen before is
scaled (Liu et al., "Ring attention with blockwise transformers for near-infinite context", 2023).
Going back, gradients of keys and values are passed around with them, and come home in the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.torch.autograd import untraced
from hvdlite.torch.sharding.collectives import Collectives


@dataclass(frozen=True)
class Ring:
    """The ranks that have the other words, in their order, and this rank's place among them."""

    members: tuple[int, ...]
    place: int
    collectives: Collectives

    def __post_init__(self) -> None:
        self.collectives.join(self.members)

    def passed(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Send tensors to the next rank, and return those of the one before."""
        n = len(self.members)
        flat = torch.cat([each.reshape(-1) for each in tensors])
        sends, receives = [0] * n, [0] * n
        sends[(self.place + 1) % n] = receives[(self.place - 1) % n] = flat.numel()
        came = self.collectives.alltoall(flat, sends, receives, self.members)
        parts = torch.split(came, [each.numel() for each in tensors])
        return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]

    def sources(self) -> list[int]:
        """Return whose keys and values this rank sees, in order."""
        return [(self.place - step) % len(self.members) for step in range(len(self.members))]


@dataclass(frozen=True)
class _Scores:
    """How scores come from queries and keys of one rank."""

    scale: float
    causal: bool
    ring: Ring

    def sees(self, source: int) -> bool:
        """Return whether any word here sees one of that rank's words."""
        return not self.causal or source <= self.ring.place

    def of(self, query: Any, key: Any, mask: Any, source: int) -> Any:
        found = query @ key.transpose(-2, -1) * self.scale
        if mask is not None:
            seen = _columns(mask, source, key.shape[-2])
            if mask.dtype == torch.bool:
                found = found.masked_fill(~seen, -math.inf)
            else:
                found = found + seen
        if self.causal and source == self.ring.place:
            later = torch.ones(found.shape[-2:], dtype=torch.bool, device=found.device).triu(1)
            found = found.masked_fill(later, -math.inf)
        return found


def _columns(mask: torch.Tensor, source: int, length: int) -> torch.Tensor:
    """Return what a mask says of one rank's keys."""
    if mask.shape[-1] == 1:
        return mask
    return mask.narrow(-1, source * length, length)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, scores: _Scores) -> Any:
        kind = torch.promote_types(query.dtype, torch.float32)
        exact = query.to(kind)
        largest = exact.new_full((*query.shape[:-1], 1), -math.inf)
        powers = torch.zeros_like(largest)
        found = exact.new_zeros((*query.shape[:-1], value.shape[-1]))
        at = [key, value]
        for step, source in enumerate(scores.ring.sources()):
            at = scores.ring.passed(at) if step else at
            if not scores.sees(source):
                continue
            k, v = (each.to(kind) for each in at)
            here = scores.of(exact, k, mask, source)
            higher = torch.maximum(largest, here.amax(-1, keepdim=True))
            base = higher.masked_fill(higher == -math.inf, 0)  # No word is seen so far.
            before, shares = (largest - base).exp(), (here - base).exp()
            powers = powers * before + shares.sum(-1, keepdim=True)
            found = found * before + shares @ v
            largest = higher
        nothing = powers == 0
        found = found / powers.masked_fill(nothing, 1)
        logarithms = (largest + powers.log()).masked_fill(nothing, math.inf)
        ctx.save_for_backward(query, key, value, mask, found, logarithms)
        ctx.scores = scores
        return found.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, mask, found, logarithms = ctx.saved_tensors
        scores: _Scores = ctx.scores
        kind = found.dtype
        exact, gradient = query.to(kind), gradients[0].to(kind)
        slope = (gradient * found).sum(-1, keepdim=True)
        of_query = torch.zeros_like(exact)
        of_mask = torch.zeros_like(mask, dtype=kind) if ctx.needs_input_grad[3] else None
        at = [key.to(kind), value.to(kind)]
        at += [torch.zeros_like(each) for each in at]
        for step, source in enumerate(scores.ring.sources()):
            at = scores.ring.passed(at) if step else at
            if not scores.sees(source):
                continue
            k, v, of_key, of_value = at
            shares = (scores.of(exact, k, mask, source) - logarithms).exp()
            of_value += shares.transpose(-2, -1) @ gradient
            of_scores = shares * (gradient @ v.transpose(-2, -1) - slope)
            if of_mask is not None:
                part = _columns(of_mask, source, k.shape[-2])
                part += of_scores.sum_to_size(part.shape)
            of_query += of_scores @ k * scores.scale
            of_key += of_scores.transpose(-2, -1) @ exact * scores.scale
        of_key, of_value = scores.ring.passed(at[2:])
        return (
            of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype),
            None if of_mask is None else of_mask.to(mask.dtype), None,
        )  # fmt: skip


@untraced
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    ring: Ring,
) -> torch.Tensor:
    """Return what this rank's words see of all words, as `scaled_dot_product_attention` does."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    found: torch.Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        query, key, value, mask, _Scores(factor, causal, ring)
    )
    return found
