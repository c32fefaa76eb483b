"""The GPT of sharding.py, and the same with Megatron's collectives written by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hvdlite.torch as hvd
from hvdlite.torch.sharding.collectives import all_gather, reduce_scatter

WIDTH, HEADS, WORDS, BATCH, LAYERS = 256, 8, 64, 8, 6
OF_WORDS = ("n1.weight", "n1.bias", "n2.weight", "n2.bias", "out.bias", "down.bias")
COLUMNS, ROWS = ("q", "k", "v", "up"), ("out", "down")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        def heads(tensor: Any) -> Any:
            return tensor.view(*tensor.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)

        y = self.n1(x)
        query, key, value = heads(self.q(y)), heads(self.k(y)), heads(self.v(y))
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.n2(x))))


def whole_batch() -> torch.Tensor:
    return torch.randn(BATCH, WORDS, WIDTH, generator=torch.Generator().manual_seed(1))


def _of_all(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensors of all ranks, in a dimension of their own."""
    found = tensor.new_empty(hvd.size(), *tensor.shape)
    all_gather(found.view(-1), tensor.contiguous().view(-1))
    return found


def _gathered(words: torch.Tensor) -> torch.Tensor:
    """Return all words, of which each rank has its own."""
    return _of_all(words).movedim(0, 1).flatten(1, 2)


def _scattered(summands: torch.Tensor) -> torch.Tensor:
    """Return this rank's words of the sum."""
    parts = torch.stack(summands.chunk(hvd.size(), 1))
    found = parts.new_empty(parts.shape[1:])
    reduce_scatter(found.view(-1), parts.view(-1))
    return found


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum, which takes the memory of a product, or of the gradient of its input."""
    found = tensor.contiguous()
    dist.all_reduce(found)
    return found


def _words_of_all(share: torch.Tensor) -> torch.Tensor:
    """Return this rank's words of the whole batch, of which each rank has a share."""
    parts = torch.stack(share.chunk(hvd.size(), 1))
    found = torch.empty_like(parts)
    dist.all_to_all_single(found.view(-1), parts.view(-1))
    return found.flatten(0, 1)


def _share_of_all(words: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of the batch, of which each rank has its words."""
    n, (batch, count, width) = hvd.size(), words.shape
    found = words.new_empty(n, batch // n, count, width)
    dist.all_to_all_single(found.view(-1), words.contiguous().view(-1))
    return found.movedim(0, 1).flatten(1, 2)


def _whole_of_shares(share: torch.Tensor) -> torch.Tensor:
    return _of_all(share).flatten(0, 1)


def _own_share(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(hvd.size())[hvd.rank()].contiguous()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


class _Exchange(torch.autograd.Function):
    """What ranks exchange, and what they exchange of its gradient."""

    @staticmethod
    def forward(context: Any, tensor: Any, there: Any, back: Any) -> Any:
        context.back = back
        found = there(tensor)
        if found is tensor:
            context.mark_dirty(tensor)
        return found

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return context.back(gradients[0]), None, None


class BlockByHand(Block):
    """This rank's columns and rows of a block, on local tensors, between two exchanges each."""

    to_ranks: Any = (_same, _summed)
    from_ranks: Any = (_summed, _same)
    # Where a share of the batch comes in, and where one goes out, of which there is a loss.
    ends: Any = (_whole_of_shares, _own_share)

    def forward(self, x: Any) -> Any:
        def heads(tensor: Any) -> Any:
            return tensor.view(*tensor.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)

        def of_rows(layer: Any, tensor: Any) -> Any:
            product = functional.linear(tensor, layer.weight)
            return _Exchange.apply(product, *self.from_ranks) + layer.bias

        y = _Exchange.apply(self.n1(x), *self.to_ranks)
        query, key, value = heads(self.q(y)), heads(self.k(y)), heads(self.v(y))
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + of_rows(self.out, found.transpose(1, 2).flatten(2))
        y = _Exchange.apply(self.n2(x), *self.to_ranks)
        return x + of_rows(self.down, functional.gelu(self.up(y)))


class BlockOfWords(BlockByHand):
    """The same with norms of this rank's words, as Megatron's sequence parallelism has it."""

    to_ranks = (_gathered, _scattered)
    from_ranks = (_scattered, _gathered)
    ends = (_words_of_all, _share_of_all)


class PartByHand(nn.Sequential):
    """Blocks between shares of the batch; gradients are those of the average of all losses."""

    def forward(self, share: Any) -> Any:
        there, back = self[0].ends
        found = super().forward(_Exchange.apply(share, there, back))
        return _Exchange.apply(found, back, lambda gradient: there(gradient / hvd.size()))


def cut_by_hand(kind: type[BlockByHand]) -> Any:
    def cut(model: nn.Sequential) -> tuple[nn.Module, torch.Tensor]:
        n, rank = hvd.size(), hvd.rank()
        found = PartByHand(*[kind() for _ in model])
        found.load_state_dict(model.state_dict())
        for block in found:
            for name in (*COLUMNS, *ROWS):
                layer, dim = getattr(block, name), 0 if name in COLUMNS else 1
                layer.weight = nn.Parameter(layer.weight.detach().chunk(n, dim)[rank].clone())
                if name in COLUMNS:
                    layer.bias = nn.Parameter(layer.bias.detach().chunk(n)[rank].clone())
        return found, whole_batch().chunk(n)[rank]

    return cut


def sum_gradients_of_words(model: nn.Module) -> None:
    """Add the gradients of parameters that work on a rank's words."""
    found = [
        each.grad
        for name, each in model.named_parameters()
        if each.grad is not None and name.split(".", 1)[1] in OF_WORDS
    ]
    flat = torch.cat([each.view(-1) for each in found])
    dist.all_reduce(flat)
    for each, total in zip(found, flat.split([each.numel() for each in found]), strict=True):
        each.copy_(total.view(each.shape))
