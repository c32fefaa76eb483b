"""How long a step of a GPT that is cut by columns and rows takes: by strategies, by hand, by torch.

    hvdlite-run -np 2 python benchmarks/sharding.py            # hvdlite.torch.sharding, and by hand
    hvdlite-run -np 2 python benchmarks/sharding.py --gloo     # parallelize_module over gloo
    hvdlite-run -np 2 python benchmarks/sharding.py --optimizer AdamW
    python benchmarks/sharding.py --plan 48                    # so many layers are planned only

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
from sharding_by_hand import (
    COLUMNS,
    LAYERS,
    ROWS,
    WIDTH,
    WORDS,
    Block,
    BlockByHand,
    BlockOfWords,
    cut_by_hand,
    sum_gradients_of_words,
    whole_batch,
)
from torch import nn

import hvdlite.torch as hvd
from hvdlite.torch import sharding


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


def columns_and_rows(layers: int, n: int) -> dict[str, Any]:
    strategies: dict[str, Any] = {}
    for index in range(layers):
        strategies |= {f"{index}.{name}": ((1, 1, 1), (1, n)) for name in COLUMNS}
        strategies |= {f"{index}.{name}": ((1, 1, n), (n, 1)) for name in ROWS}
    return strategies


class Ranks:
    """As much of a mesh as a plan looks at."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks


def time_plans(layers: int) -> None:
    """Print the seconds of a core that plans of so many layers take, and the printing of them."""
    with torch.device("meta"):
        model = nn.Sequential(*[Block() for _ in range(layers)])
        batch = torch.empty(16, WORDS, WIDTH)
    for search in ("propagation", "dynamic_programming", "recursive_programming"):
        for n in (4, 8, 16):
            given = columns_and_rows(layers, n) if search == "propagation" else {}
            start = time.process_time()
            plan = sharding.plan(model, batch, given, Ranks(n), search=search)
            planned = time.process_time()
            lines = str(plan).count("\n")
            printed = time.process_time()
            sys.stdout.write(
                f"{layers} layers, {n} ranks, {search}: planned in {planned - start:.2f} s, "
                f"printed in {printed - planned:.2f} s ({lines} lines)\n"
            )


def cut_by_strategies(whole_norms: bool) -> Any:
    def cut(model: nn.Sequential) -> tuple[nn.Module, torch.Tensor]:
        n = hvd.size()
        strategies = columns_and_rows(LAYERS, n)
        for index in range(LAYERS):
            if whole_norms:
                strategies |= {f"{index}.{name}": ((1, 1, 1), (1,), (1,)) for name in ("n1", "n2")}
                strategies |= {f"{index}.{name}.add": ((1, 1, 1), (1,)) for name in ROWS}
                strategies |= {f"{index}.{name}": ((1, 1, 1),) * 2 for name in ("add", "add_1")}
        share = whole_batch().chunk(n)[hvd.rank()]
        return sharding.shard(model, example=share, strategies=strategies), share

    return cut


class Training:
    """A model that was cut, the time that its first step took, and those of the others."""

    def __init__(self, name: str, cut: Any, model: nn.Sequential, make: Any) -> None:
        self.name = name
        # Of whole steps, until the gradients are there, and of the optimizer.
        self.seconds: dict[str, list[float]] = {"step": [], "gradients": [], "optimizer": []}
        self.losses: list[float] = []
        start = time.perf_counter()
        self.part, self.batch = cut(copy.deepcopy(model))
        self.optimizer = make(self.part.parameters())
        self.step()
        self.first = time.perf_counter() - start

    def step(self) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.part(self.batch).square().mean()
        loss.backward()
        if isinstance(self.part[0], BlockOfWords):
            sum_gradients_of_words(self.part)
        computed = time.perf_counter()
        self.optimizer.step()
        self.losses.append(float(loss.detach()))
        end = time.perf_counter()
        times = {"step": end - start, "gradients": computed - start, "optimizer": end - computed}
        for name, seconds in times.items():
            self.seconds[name].append(seconds)

    def over(self, other: Training, what: str) -> float:
        """Return the median ratio of times, the first step left out."""
        times = zip(self.seconds[what][1:], other.seconds[what][1:], strict=True)
        return median(a / b for a, b in times)

    def __str__(self) -> str:
        steps, optimizer = self.seconds["step"][1:], self.seconds["optimizer"][1:]
        return (
            f"{self.name}, {hvd.size()} ranks: first step after {self.first:.2f} s, then "
            f"{median(steps) * 1e3:.1f} ms (least {min(steps) * 1e3:.1f}), of which the optimizer "
            f"{median(optimizer) * 1e3:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--gloo", action="store_true", help="parallelize_module over gloo")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--optimizer", choices=("SGD", "AdamW"), default="SGD")
    parser.add_argument("--dtensors", action="store_true", help="sharding without local_step")
    parser.add_argument("--plan", type=int, metavar="LAYERS", help="plan only, without a job")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.plan:
        time_plans(options.plan)
        return
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

    def make(name: str) -> Any:
        is_local = name.startswith("hvdlite") and not options.dtensors
        prepare = sharding.local_step if is_local else lambda optimizer: optimizer
        return lambda parameters: prepare(getattr(torch.optim, options.optimizer)(parameters, 1e-3))

    trained = [Training(name, cut, model, make(name)) for name, cut in cuts.items()]
    for _ in range(options.steps):
        for each in trained:
            dist.barrier()
            each.step()
    if hvd.rank() == 0:
        for each in trained:
            sys.stdout.write(f"{each}\n")
        for one, other in zip(trained[::2], trained[1::2], strict=False):
            torch.testing.assert_close(one.losses, other.losses, rtol=1e-3, atol=1e-5)
            sys.stdout.write(
                f"{one.name} / by hand: {one.over(other, 'step'):.3f} "
                f"(until the gradients: {one.over(other, 'gradients'):.3f})\n"
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
