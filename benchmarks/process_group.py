"""How long torch.distributed takes over hvdlite and over gloo: collectives, sharded training.

    python benchmarks/process_group.py                    # 2 ranks, a minute and a half
    python benchmarks/process_group.py --quick            # 20 seconds
    python benchmarks/process_group.py --cases "all_reduce 64 MiB" "FSDP2 step"

Needs the extra torch. Each backend runs in jobs of its own, which are launched in turns; every rank
has one computing thread. The calls are those of ``torch.distributed``, the same lines for both
backends, and each result is checked before it is timed.

"hvd.allreduce_ 4 B" is no call of torch.distributed: what "all_reduce 4 B" takes longer is what the
process group adds.

Prints a table (the median of the jobs, in brackets the least and the most of them; the ratios are
those of the medians, and of the least), and writes all figures to a JSON file.
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
from measuring import Ranks, Spread, Way, interleave, make_parser, parse, table
from peers import GlooRanks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HVDLITE, GLOO = "hvdlite", "gloo"
MIB = 1 << 20
SMALL_CALLS = 50
WIDTH, LAYERS = 512, 8  # of the network that is trained: 8.4 MB


class GroupRanks(GlooRanks):
    """The ranks of a job that are connected by the process group hvdlite."""

    def __init__(self, meeting: Path, size: int) -> None:
        import hvdlite.torch as hvd

        hvd.init_process_group()
        self.rank, self.size = dist.get_rank(), size
        self.barrier: Callable[[], None] = dist.barrier


def calls_of(ranks: Ranks) -> dict[str, Callable[[], Way]]:
    """Return what makes each case: the function that is timed, checked already."""
    sizes = {"4 B": 4, "1 MiB": MIB, "16 MiB": 16 * MIB, "64 MiB": 64 * MIB}
    cases: dict[str, Callable[[], Way]] = {}
    for name, nbytes in sizes.items():
        cases[f"all_reduce {name}"] = lambda nbytes=nbytes: reduced(ranks, nbytes)
    for name, make in (
        ("all_gather_single", gathered),
        ("reduce_scatter_single", scattered),
        ("all_to_all_single", exchanged),
        ("broadcast", copied),
    ):
        cases[f"{name} 64 MiB"] = lambda make=make: make(ranks, 64 * MIB)
    cases["50 all_reduce 4 B at once"] = lambda: many_reduced(ranks)
    if isinstance(ranks, GroupRanks):
        cases["hvd.allreduce_ 4 B"] = reduced_by_hvdlite
    cases["barrier"] = lambda: dist.barrier
    cases["send and recv 16 B"] = lambda: ping_pong(ranks, 16)
    cases["send and recv 4 MiB"] = lambda: ping_pong(ranks, 4 * MIB)
    cases["DDP step"] = lambda: step_of(DistributedDataParallel(network()))
    cases["FSDP2 step"] = lambda: step_of(sharded())
    return cases


def new(nbytes: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((max(nbytes // 4, 1),), float(value))


def check(tensor: torch.Tensor, value: float) -> None:
    """Raise `ArithmeticError` unless the first and last element have this value."""
    if not tensor[0].item() == tensor[-1].item() == value:
        raise ArithmeticError(f"{tensor[0].item()}, {tensor[-1].item()}, not {value}")


def reduced(ranks: Ranks, nbytes: int) -> Way:
    tensor = new(nbytes)
    dist.all_reduce(tensor)
    check(tensor, ranks.size)
    tensor.fill_(0)
    return lambda: dist.all_reduce(tensor)


def reduced_by_hvdlite() -> Way:
    import hvdlite.torch as hvd

    tensor = new(4, 0)
    return lambda: hvd.allreduce_(tensor, name="process_group.small")


def many_reduced(ranks: Ranks) -> Way:
    tensors = [new(4, 0) for _ in range(SMALL_CALLS)]

    def way() -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    way()
    return way


def gathered(ranks: Ranks, nbytes: int) -> Way:
    part, whole = new(nbytes // ranks.size, ranks.rank), new(nbytes)
    call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(whole, part)
    check(whole[-part.numel() :], ranks.size - 1)
    return lambda: call(whole, part)


def scattered(ranks: Ranks, nbytes: int) -> Way:
    part, whole = new(nbytes // ranks.size), new(nbytes)
    call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    call(part, whole)
    check(part, ranks.size)
    return lambda: call(part, whole)


def exchanged(ranks: Ranks, nbytes: int) -> Way:
    given, taken = new(nbytes, ranks.rank), new(nbytes)
    dist.all_to_all_single(taken, given)
    check(taken[-(taken.numel() // ranks.size) :], ranks.size - 1)
    return lambda: dist.all_to_all_single(taken, given)


def copied(ranks: Ranks, nbytes: int) -> Way:
    tensor = new(nbytes, ranks.rank)
    dist.broadcast(tensor, ranks.size - 1)
    check(tensor, ranks.size - 1)
    return lambda: dist.broadcast(tensor, 0)


def ping_pong(ranks: Ranks, nbytes: int) -> Way:
    """There and back between ranks 0 and 1: two messages."""
    tensor = new(nbytes, ranks.rank)

    def way() -> None:
        if ranks.rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        elif ranks.rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)

    way()
    check(tensor, 0 if ranks.rank < 2 else ranks.rank)
    return way


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def sharded() -> nn.Module:
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # before torch 2.6
        from torch.distributed._composable.fsdp import fully_shard
    model = network()
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh) or model


def step_of(model: nn.Module) -> Way:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=False)
    inputs = torch.randn(16, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    step()
    step()
    return step


def rank_main(args: argparse.Namespace) -> None:
    """Measure one entry, as one rank of its job."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    (entry,), (size,) = args.entries, args.ranks
    meeting = args.rank_file.with_name("meeting")
    ranks = (GroupRanks if entry == HVDLITE else GlooRanks)(meeting, size)
    records = []
    for case, make in calls_of(ranks).items():
        if args.cases and case not in args.cases:
            continue
        (seconds,) = interleave({case: make()}, args.seconds, ranks).values()
        each = SMALL_CALLS if case.startswith("50 ") else 1
        took = median(seconds) / each
        records.append({"case": case, "ranks": size, "entry": entry, "seconds": took})
    if ranks.rank == 0:
        args.rank_file.write_text(json.dumps(records))
    dist.barrier()
    os._exit(0)  # gloo's threads would end the process by an abort, now and then.


def print_table(records: Sequence[Record]) -> None:
    lines: dict[tuple[str, int], dict[str, Spread]] = {}
    for record in records:
        line = lines.setdefault((record["case"], record["ranks"]), {})
        line[record["entry"]] = Spread(**record["seconds"])
    rows = []
    for (case, ranks), line in lines.items():
        figures = [str(line[entry]) if entry in line else "" for entry in (HVDLITE, GLOO)]
        ratios = ["", ""]
        if len(line) == 2:
            own, other = line[HVDLITE], line[GLOO]
            ratios = [f"{own.median / other.median:.2f}", f"{own.low / other.low:.2f}"]
        rows.append([case, str(ranks), *figures, *ratios])
    print()
    print(table(["", "ranks", HVDLITE, GLOO, f"{HVDLITE} / {GLOO}", "least / least"], rows))


def main() -> None:
    parser = make_parser("torch.distributed over hvdlite and gloo.", "process_group", [2])
    parser.add_argument("--entries", nargs="+", choices=[HVDLITE, GLOO], default=[HVDLITE, GLOO])
    parser.add_argument("--cases", nargs="+", default=[], help="some of the lines of the table")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a job, for each case")
    add_job_options(parser, 3)
    args = parse(parser, "one job of each", rounds=1, seconds=0.1)
    if args.rank_file:
        rank_main(args)
        return
    records, left_out = run_jobs(__file__, args, sys.argv[1:])
    print_table(records)
    finish(args.json, records, left_out)


if __name__ == "__main__":
    main()
