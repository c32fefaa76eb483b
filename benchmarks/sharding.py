"""How long a step of a GPT that is cut by columns and rows takes: sharding over hvdlite, and gloo.

    hvdlite-run -np 2 python benchmarks/sharding.py            # hvdlite.torch.sharding
    hvdlite-run -np 2 python benchmarks/sharding.py --gloo     # parallelize_module over gloo

Needs the extra torch. Both cut the same 6 layers alike, with heads among the ranks, and compute the
same batch; every rank has one computing thread. Run them in turns, on a machine that does nothing
else. Prints the time until the first step is done, plan included, and of the steps that follow the
median and the least.
"""

from __future__ import annotations

import argparse
import itertools
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

WIDTH, HEADS, WORDS, BATCH, LAYERS = 256, 8, 64, 8, 6
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
    return model, torch.randn(BATCH, WORDS, WIDTH)


def cut_by_strategies(model: nn.Sequential) -> tuple[nn.Module, torch.Tensor]:
    from hvdlite.torch import sharding

    hvd.init_process_group()
    n = hvd.size()
    for block in model:
        for name in COLUMNS:
            sharding.set_strategy(getattr(block, name), ((1, 1, 1), (1, n)))
        for name in ROWS:
            sharding.set_strategy(getattr(block, name), ((1, 1, n), (n, 1)))
    share = torch.randn(BATCH, WORDS, WIDTH).chunk(n)[hvd.rank()]
    return sharding.shard(model, example=share), share


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--gloo", action="store_true", help="parallelize_module over gloo")
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hvd.init()
    model = nn.Sequential(*[Block() for _ in range(LAYERS)])
    start = time.perf_counter()
    part, batch = (cut_by_torch if options.gloo else cut_by_strategies)(model)
    optimizer = torch.optim.SGD(part.parameters(), 1e-3)
    ends = [time.perf_counter()]
    for _ in range(options.steps + 1):
        optimizer.zero_grad()
        part(batch).square().mean().backward()
        optimizer.step()
        ends.append(time.perf_counter())
    if hvd.rank() == 0:
        steps = [b - a for a, b in itertools.pairwise(ends[1:])]
        name = "parallelize_module over gloo" if options.gloo else "hvdlite.torch.sharding"
        sys.stdout.write(
            f"{name}, {hvd.size()} ranks: first step after {ends[1] - start:.2f} s, then "
            f"{median(steps) * 1e3:.1f} ms (least {min(steps) * 1e3:.1f})\n"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
