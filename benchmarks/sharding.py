"""How long a step of a GPT that is cut by columns and rows takes: by strategies, by hand, by torch.

    hvdlite-run -np 2 python benchmarks/sharding.py            # hvdlite.torch.sharding, and by hand
    hvdlite-run -np 2 python benchmarks/sharding.py --gloo     # parallelize_module over gloo

Needs the extra torch. All cut the same 6 layers alike, with heads among the ranks, and compute the
same batch; every rank has one computing thread. By hand are Megatron's collectives on local
tensors, over hvdlite: with norms of a rank's words (as the plan has it, and as sequence parallelism
does), and with whole norms and four allreduces in a layer; from shares of the batch to shares, as
the plan has it, so that both make the same exchanges. Steps go in turns within a job; run the
two jobs in turns, too, on a machine that does nothing else. Prints the time until the first step is
done, plan included, and of the steps that follow the median and the least.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hvdlite.torch as hvd
from hvdlite.torch import sharding
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


def cut_by_torch(model: nn.Sequential) -> tuple[nn.Module, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    own = str(Path(tempfile.mkdtemp()) / "ranks") if hvd.rank() == 0 else None
    file = hvd.broadcast_object(own, 0)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=hvd.rank(), world_size=hvd.size()
    )
    styles: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS}
    styles |= {name: RowwiseParallel() for name in ROWS}
    mesh = init_device_mesh("cpu", (hvd.size(),))
    for block in model:
        parallelize_module(block, mesh, styles)
    return model, whole_batch()


def cut_by_strategies(whole_norms: bool) -> Any:
    def cut(model: nn.Sequential) -> tuple[nn.Module, torch.Tensor]:
        n = hvd.size()
        strategies: dict[str, Any] = {}
        for index in range(LAYERS):
            strategies |= {f"{index}.{name}": ((1, 1, 1), (1, n)) for name in COLUMNS}
            strategies |= {f"{index}.{name}": ((1, 1, n), (n, 1)) for name in ROWS}
            if whole_norms:
                strategies |= {f"{index}.{name}": ((1, 1, 1), (1,), (1,)) for name in ("n1", "n2")}
                strategies |= {f"{index}.{name}.add": ((1, 1, 1), (1,)) for name in ROWS}
                strategies |= {f"{index}.{name}": ((1, 1, 1),) * 2 for name in ("add", "add_1")}
        share = whole_batch().chunk(n)[hvd.rank()]
        return sharding.shard(model, example=share, strategies=strategies), share

    return cut


def _gathered(words: torch.Tensor) -> torch.Tensor:
    """Return all words, of which each rank has its own."""
    found = words.new_empty(hvd.size(), *words.shape)
    all_gather(found.view(-1), words.contiguous().view(-1))
    return found.movedim(0, 1).flatten(1, 2)


def _scattered(summands: torch.Tensor) -> torch.Tensor:
    """Return this rank's words of the sum."""
    parts = torch.stack(summands.chunk(hvd.size(), 1))
    found = parts.new_empty(parts.shape[1:])
    reduce_scatter(found.view(-1), parts.view(-1))
    return found


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.clone(memory_format=torch.contiguous_format)
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
    found = share.new_empty(hvd.size() * share.shape[0], *share.shape[1:])
    all_gather(found.view(-1), share.contiguous().view(-1))
    return found


def _own_share(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(hvd.size())[hvd.rank()].contiguous()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


class _Exchange(torch.autograd.Function):
    """What ranks exchange, and what they exchange of its gradient."""

    @staticmethod
    def forward(context: Any, tensor: Any, there: Any, back: Any) -> Any:
        context.back = back
        return there(tensor)

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


class Training:
    """A model that was cut, the time that its first step took, and those of the others."""

    def __init__(self, name: str, cut: Any, model: nn.Sequential) -> None:
        self.name = name
        self.seconds: list[float] = []
        # Of these, until the gradients are there: an optimizer is torch's, and slow with DTensors.
        self.until_gradients: list[float] = []
        self.losses: list[float] = []
        start = time.perf_counter()
        self.part, self.batch = cut(copy.deepcopy(model))
        self.optimizer = torch.optim.SGD(self.part.parameters(), 1e-3)
        self.step()
        self.first = time.perf_counter() - start

    def step(self) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.part(self.batch).square().mean()
        loss.backward()
        if isinstance(self.part[0], BlockOfWords):
            sum_gradients_of_words(self.part)
        self.until_gradients.append(time.perf_counter() - start)
        self.optimizer.step()
        self.losses.append(float(loss.detach()))

    def timed_step(self) -> None:
        dist.barrier()
        start = time.perf_counter()
        self.step()
        self.seconds.append(time.perf_counter() - start)

    def __str__(self) -> str:
        return (
            f"{self.name}, {hvd.size()} ranks: first step after {self.first:.2f} s, then "
            f"{median(self.seconds) * 1e3:.1f} ms (least {min(self.seconds) * 1e3:.1f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--gloo", action="store_true", help="parallelize_module over gloo")
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hvd.init()
    model = nn.Sequential(*[Block() for _ in range(LAYERS)])
    cuts: dict[str, Any] = {
        "hvdlite.torch.sharding": cut_by_strategies(False),
        "the same by hand": cut_by_hand(BlockOfWords),
        "hvdlite.torch.sharding, norms whole": cut_by_strategies(True),
        "the same by hand, norms whole": cut_by_hand(BlockByHand),
    }
    if options.gloo:
        cuts = {"parallelize_module over gloo": cut_by_torch}
    else:
        hvd.init_process_group()
    trained = [Training(name, cut, model) for name, cut in cuts.items()]
    for _ in range(options.steps):
        for each in trained:
            each.timed_step()
    if hvd.rank() == 0:
        for each in trained:
            sys.stdout.write(f"{each}\n")
        for one, other in zip(trained[::2], trained[1::2], strict=False):
            assert torch.allclose(torch.tensor(one.losses), torch.tensor(other.losses))
            ratios = [
                median(a / b for a, b in zip(*times, strict=True))
                for times in (
                    (one.seconds, other.seconds),
                    (one.until_gradients[1:], other.until_gradients[1:]),
                )
            ]
            sys.stdout.write(
                f"{one.name} / by hand: {ratios[0]:.3f} (until the gradients: {ratios[1]:.3f})\n"
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
