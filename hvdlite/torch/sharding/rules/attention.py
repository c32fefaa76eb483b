"""torch's multi-head attention with its heads in a dimension of their own, and its weights apart.

`nn.MultiheadAttention` has query, key and value in one product, and folds heads into the batch. Of
neither can ranks have some heads: that would be every n-th block of a dimension. So while a part is
recorded, `attention` runs in its place, which has the same written otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from hvdlite.torch.autograd import untraced
from hvdlite.torch.sharding.collectives import Collectives

# What stands for the query's, key's and value's rows of one weight.
_NAME = "hvdlite::rows_apart"
torch.library.define(_NAME, "(Tensor packed, int parts) -> Tensor")


@torch.library.impl(_NAME, "CompositeImplicitAutograd")  # type: ignore[misc, unused-ignore]
def rows_apart(packed: torch.Tensor, parts: int) -> torch.Tensor:
    """Return the rows of a tensor as so many parts, in a new first dimension."""
    return packed.view(parts, -1, *packed.shape[1:])


@dataclass(frozen=True)
class Rows:
    """The ranks that have the other rows of a packed tensor, and this rank's place among them.

    Each rank holds as many blocks of rows as there are parts. Block `b` of all of them belongs to
    the part ``b // n`` and the rank ``b % n``, with `n` ranks.
    """

    members: tuple[int, ...]
    place: int
    collectives: Collectives

    def __post_init__(self) -> None:
        self.collectives.join(self.members)

    def ways(self, parts: int) -> tuple[list[int], list[int], list[int]]:
        """Return the order in which blocks are sent, and how many go to and come from members."""
        n = len(self.members)
        goals = [(self.place * parts + block) % n for block in range(parts)]
        sources = [(part * n + self.place) // parts for part in range(parts)]
        order = sorted(range(parts), key=goals.__getitem__)
        return order, [goals.count(each) for each in range(n)], [
            sources.count(each) for each in range(n)
        ]  # fmt: skip


class _RowsApart(torch.autograd.Function):
    """The rows of each part that this rank has; going back, the gradient of the packed rows."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, parts: int, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        blocks = packed.reshape(parts, -1)
        order, sends, receives = rows.ways(parts)
        sent, length = blocks[order].view(-1), blocks.shape[1]
        came = rows.collectives.alltoall(
            sent, [n * length for n in sends], [n * length for n in receives], rows.members
        )
        return came.view(parts, -1, *packed.shape[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None]:
        (apart,), rows = gradients, ctx.rows
        parts = len(apart)
        blocks = apart.reshape(parts, -1)
        order, sends, receives = rows.ways(parts)
        length = blocks.shape[1]
        came = rows.collectives.alltoall(
            blocks.reshape(-1), [n * length for n in receives], [n * length for n in sends],
            rows.members,
        )  # fmt: skip
        found = torch.empty_like(blocks)
        found[order] = came.view(parts, -1)
        return found.view(-1, *apart.shape[2:]), None, None


@untraced
def rows_of_ranks_apart(packed: torch.Tensor, parts: int, rows: Rows) -> torch.Tensor:
    """Return this rank's rows of each part of a tensor that ranks have by rows."""
    found: torch.Tensor = _RowsApart.apply(packed, parts, rows)  # type: ignore[no-untyped-call]
    return found


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    width: int,
    heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout: float,
    out_weight: torch.Tensor,
    out_bias: Any,
    **options: Any,
) -> Any:
    """Return what `multi_head_attention_forward` of torch does, for [words, batch, width].

    What few models have is left to that function itself: an attention of its own for all, static
    keys and values, masks for each head, and inputs without a batch.
    """
    mask, padding = options.get("attn_mask"), options.get("key_padding_mask")
    if (
        bias_k is not None
        or add_zero_attn
        or options.get("static_k") is not None
        or options.get("static_v") is not None
        or (mask is not None and mask.ndim != 2)
        or query.ndim != 3
        or query.shape[-1] != width
    ):
        return functional.multi_head_attention_forward(
            query, key, value, width, heads, in_proj_weight, in_proj_bias, bias_k, bias_v,
            add_zero_attn, dropout, out_weight, out_bias, **options,
        )  # fmt: skip
    needs_weights = options.get("need_weights", True)
    causal = bool(options.get("is_causal")) and padding is None and not needs_weights
    if options.get("is_causal") and mask is None:
        raise ValueError("attention with is_causal=True needs attn_mask, as torch's does")
    weights, biases = _projections(in_proj_weight, in_proj_bias, options)

    def by_heads(tensor: torch.Tensor, index: int) -> torch.Tensor:
        found = functional.linear(tensor, weights[index], biases[index])
        return found.view(*found.shape[:2], heads, width // heads).permute(1, 2, 0, 3)

    q, k, v = (by_heads(each, index) for index, each in enumerate((query, key, value)))
    added = None if causal or mask is None else _added(mask, q.dtype)
    if padding is not None:
        of_words = _added(padding, q.dtype)[:, None, None]
        added = of_words if added is None else added + of_words
    rate = dropout if options.get("training", True) else 0.0
    shares = None
    if needs_weights:
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
        shares = (scores if added is None else scores + added).softmax(-1)
        shares = functional.dropout(shares, rate) if rate else shares
        found = shares @ v
        shares = shares.mean(1) if options.get("average_attn_weights", True) else shares
    else:
        found = functional.scaled_dot_product_attention(q, k, v, added, rate, causal)
    found = found.permute(2, 0, 1, 3).reshape(query.shape)
    return functional.linear(found, out_weight, out_bias), shares


def _projections(packed: Any, bias: Any, options: Any) -> tuple[list[Any], list[Any]]:
    """Return weights and biases of query, key and value."""
    biases = [None] * 3 if bias is None else list(torch.ops.hvdlite.rows_apart(bias, 3).unbind())
    if options.get("use_separate_proj_weight"):
        return [options[f"{each}_proj_weight"] for each in "qkv"], biases
    return list(torch.ops.hvdlite.rows_apart(packed, 3).unbind()), biases


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what a mask adds to scores: nothing, or minus infinity where a bool is True."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
