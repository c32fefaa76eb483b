"""How long hvdlite takes on GPUs, beside DistributedDataParallel over NCCL: gradients, training.

    python benchmarks/gpu.py                       # 2 ranks, on one GPU or several; minutes
    python benchmarks/gpu.py --ranks 8             # 8 GPUs
    python benchmarks/gpu.py --device cpu --quick  # without a GPU: the same calls over gloo

Needs the extras torch and examples. Each entry runs in jobs of its own, launched in turns:

    hvdlite        DistributedOptimizer; NCCL by torch's process groups
    hvdlite nccl   the same over hvdlite's own binding to NCCL
    DDP            DistributedDataParallel over NCCL

"161 gradients" are those of ResNet-50, from the beginning of a trivial backward until all are
reduced; "flat 97.5 MiB" is one gradient of their size. "ResNet-50 step" is forward, backward, SGD.
Results are checked before anything is timed, and every figure waits for the device.

Ranks that share a GPU need NCCL 2.30 or newer, which may be newer than the one that torch brings:
install the wheel of NVIDIA, and name its libnccl.so.2 in LD_PRELOAD. Where there is no GPU, or not
this NCCL, the benchmark says so and ends with status 2.

Prints a table (the median of the jobs, in brackets the least and the most of them), and writes all
figures to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from jobs import Record, add_job_options, finish, run_jobs
from measuring import Ranks, Spread, Way, interleave, launched_rank, make_parser, parse, table
from peers import GlooRanks
from resnet50 import SIZES
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvdlite.common.devices.nccl.binding import Nccl

EXAMPLES = Path(__file__).parent.parent / "examples"
HVDLITE, OWN_NCCL, DDP = "hvdlite", "hvdlite nccl", "DDP"
SHARES_GPUS = 23000  # NCCL 2.30, the oldest that lets ranks share a GPU.
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"


class TorchRanks(GlooRanks):
    """The ranks of a job that are connected by torch.distributed: gloo, and NCCL on GPUs."""

    backend = "cpu:gloo,cuda:nccl"

    def __init__(self, meeting: Path, size: int, device: torch.device) -> None:
        self.backend = type(self).backend if device.type == "cuda" else "gloo"
        super().__init__(meeting, size)
        self.barrier: Callable[[], None] = lambda: dist.all_reduce(torch.zeros(1))

    def trained(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
        return Trained(DistributedDataParallel(model), optimizer, lambda: None)


class HvdliteRanks:
    """The ranks of a job that are connected by hvdlite."""

    def __init__(self) -> None:
        import hvdlite.torch as hvd

        hvd.init()
        self._hvd: Any = hvd
        self.rank, self.size = hvd.rank(), hvd.size()
        self.barrier: Callable[[], None] = hvd.barrier

    def largest(self, values: Sequence[float]) -> list[float]:
        given = torch.tensor(values, dtype=torch.float64)
        found: list[float] = self._hvd.allreduce(given, op=self._hvd.Max, name="largest").tolist()
        return found

    def trained(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
        made = self._hvd.DistributedOptimizer(optimizer, [*model.named_parameters()])
        return Trained(model, made, made.synchronize)


class Trained:
    """A model whose gradients are reduced over all ranks when `reduced` has returned."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, reduced: Callable[[], None]
    ) -> None:
        self.model, self.optimizer, self.reduced = model, optimizer, reduced


class Gradients(nn.Module):
    """A model whose backward does nothing but give gradients of these sizes: all `value`."""

    def __init__(self, sizes: Sequence[int], value: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(size) for size in sizes)
        self._value = value

    def forward(self) -> torch.Tensor:
        return sum((weight.sum() for weight in self.weights), torch.zeros(())) * self._value


def wait_for(device: torch.device) -> None:
    """Wait until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gradients(ranks: Any, device: torch.device, sizes: Sequence[int]) -> Way:
    """Return backward and reduction, whose averages are checked."""
    model = Gradients(sizes, ranks.rank + 1).to(device)
    trained = ranks.trained(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def way() -> None:
        trained.optimizer.zero_grad(set_to_none=False)
        trained.model().backward()
        trained.reduced()
        wait_for(device)

    way()
    way()
    for weight in model.weights:
        if weight.grad is None or not bool((weight.grad == (ranks.size + 1) / 2).all()):
            raise ArithmeticError(f"rank {ranks.rank}: a gradient is not the average of all ranks")
    return way


def resnet50_step(ranks: Any, device: torch.device, images: int, pixels: int) -> Way:
    """Return a step of training, after which all ranks have the same weights."""
    sys.path.append(str(EXAMPLES))
    from torch_synthetic_benchmark import ResNet50

    torch.manual_seed(1)
    model = ResNet50().to(device)
    trained = ranks.trained(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    torch.manual_seed(ranks.rank)
    given = torch.randn(images, 3, pixels, pixels, device=device)
    labels = torch.randint(1000, (images,), device=device)

    def way() -> None:
        trained.optimizer.zero_grad()
        nn.functional.cross_entropy(trained.model(given), labels).backward()
        trained.optimizer.step()
        wait_for(device)

    way()
    way()
    last = [*model.parameters()][-1].sum().item()
    if ranks.largest([last]) != [last] or ranks.largest([-last]) != [-last]:
        raise ArithmeticError(f"rank {ranks.rank}: the weights of the ranks are not the same")
    return way


def cases_of(
    args: argparse.Namespace, ranks: Ranks, device: torch.device
) -> dict[str, Callable[[], Way]]:
    sizes = [max(1, int(args.share * size)) for size in SIZES]
    flat = [sum(sizes)]
    images, pixels = (2, 32) if device.type == "cpu" else (32, 224)
    return {
        "161 gradients": lambda: gradients(ranks, device, sizes),
        f"flat {flat[0] * 4 / (1 << 20):.1f} MiB": lambda: gradients(ranks, device, flat),
        "ResNet-50 step": lambda: resnet50_step(ranks, device, images, pixels),
    }


def rank_main(args: argparse.Namespace) -> None:
    """Measure one entry, as one rank of its job."""
    warnings.simplefilter("ignore")
    (entry,), (size,) = args.entries, args.ranks
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", launched_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    ranks: Any
    if entry == DDP:
        ranks = TorchRanks(args.rank_file.with_name("meeting"), size, device)
    else:
        on_gpu = "nccl" if entry == OWN_NCCL else "auto"
        os.environ["HVDLITE_DEVICES"] = on_gpu if args.device == "cuda" else "gloo"
        ranks = HvdliteRanks()
    records = []
    for case, make in cases_of(args, ranks, device).items():
        if args.cases and case.partition(" ")[0] not in args.cases:
            continue
        (seconds,) = interleave({case: make()}, args.seconds, ranks).values()
        records.append({"case": case, "ranks": size, "entry": entry, "device": args.device,
                        "seconds": median(seconds)})  # fmt: skip
    if ranks.rank == 0:
        args.rank_file.write_text(json.dumps(records))
    ranks.barrier()
    if entry == DDP:
        os._exit(0)  # gloo's threads would end the process by an abort, now and then.


def obstacle(device: str, ranks: int) -> str:
    """Return why this machine cannot run it, or ""."""
    if device == "cpu":
        return ""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU; --device cpu makes the same calls over gloo"
    if torch.cuda.device_count() >= ranks:
        return ""
    found = Nccl()  # The one that is loaded; torch tells which it was compiled with.
    if found.version < SHARES_GPUS:
        return (
            f"{ranks} ranks have to share {torch.cuda.device_count()} GPUs, which NCCL "
            f"{found.version_text} does not let them: name the libnccl.so.2 of 2.30 or "
            "newer in LD_PRELOAD"
        )
    os.environ[SHARING] = "1"
    return ""


def print_table(records: Sequence[Record], entries: Sequence[str]) -> None:
    lines: dict[tuple[str, int], dict[str, Spread]] = {}
    for record in records:
        line = lines.setdefault((record["case"], record["ranks"]), {})
        line[record["entry"]] = Spread(**record["seconds"])
    rows = []
    for (case, ranks), line in lines.items():
        ratio = ""
        if HVDLITE in line and DDP in line:
            ratio = f"{line[HVDLITE].median / line[DDP].median:.2f}"
        rows.append([case, str(ranks), *(str(line[entry]) for entry in entries), ratio])
    print()
    print(table(["", "ranks", *entries, f"{HVDLITE} / {DDP}"], rows))


def main() -> None:
    every = [HVDLITE, OWN_NCCL, DDP]
    parser = make_parser("hvdlite on GPUs, beside DDP over NCCL.", "gpu", [2])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--entries", nargs="+", choices=every, help="default: all of the device")
    parser.add_argument("--cases", nargs="+", default=[], choices=["161", "flat", "ResNet-50"])
    parser.add_argument("--share", type=float, default=1, help="of the sizes of the gradients")
    parser.add_argument("--seconds", type=float, default=2, help="of a job, for each case")
    add_job_options(parser, 3)
    args = parse(parser, "one job of each, with small gradients", rounds=1, seconds=0.1, share=0.01)
    if args.rank_file:
        rank_main(args)
        return
    args.entries = args.entries or (every if args.device == "cuda" else [HVDLITE, DDP])
    for ranks in args.ranks:
        if reason := obstacle(args.device, ranks):
            parser.error(reason)
    records, left_out = run_jobs(__file__, args, sys.argv[1:])
    print_table(records, args.entries)
    finish(args.json, records, left_out)


if __name__ == "__main__":
    main()
