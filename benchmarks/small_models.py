"""Where the time of small models goes: little to send, so that every microsecond of Python counts.

    python benchmarks/small_models.py               # 2 ranks, half a minute
    python benchmarks/small_models.py --quick       # 10 seconds

Needs the extras torch and examples. Two measurements, in jobs that are launched in turns:

- 16 gradients of 64 x 64 float32: how long ``optimizer.synchronize()`` takes after a backward that
  all ranks have begun together, the median of the steps on the slowest rank.
- examples/torch_digits.py, by the iteration trace of all ranks, medians of the iterations: from the
  end of backward of a rank to the beginning of its first segment, and the same from the end of
  backward of the last rank; the segment; and from its end to the step of the wrapped optimizer.

Prints a table (the median of the jobs, in brackets the least and the most of them), and writes all
figures to a JSON file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from jobs import (
    Record,
    add_job_options,
    environment,
    finish,
    hvdlite_run,
    in_turns,
    run_command,
    run_ranks,
    summarize,
)
from measuring import Spread, make_parser, parse, say, slowest, table
from torch import nn

import hvdlite.torch as hvd
from hvdlite.common.iterations.rows import IterationRow, read_rows

DIGITS = Path(__file__).parent.parent / "examples" / "torch_digits.py"
GRADIENTS, WIDTH = 16, 64
WARM_STEPS = 20  # not counted
SYNCHRONIZE = f"{GRADIENTS} gradients of {WIDTH} x {WIDTH}: synchronize() after backward"
GAP = "digits: end of backward to the first segment"
GAP_OF_LAST = "digits: end of backward of the last rank to the first segment"
SEGMENT = "digits: the first segment"
AFTER = "digits: end of the last segment to the optimizer"


def measure_gradients(steps: int) -> list[Record]:
    """Run one rank; return the record of `synchronize` on the slowest rank."""
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(GRADIENTS)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters()
    )
    inputs = torch.randn(8, WIDTH)
    taken = []
    for _ in range(WARM_STEPS + steps):
        hvd.barrier()  # so that nobody waits for long for another rank's backward
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        start = time.perf_counter()
        optimizer.synchronize()
        taken.append(time.perf_counter() - start)
        with optimizer.skip_synchronize():
            optimizer.step()
    seconds = slowest([SYNCHRONIZE], [median(taken[WARM_STEPS:])])[SYNCHRONIZE]
    return [{"ranks": hvd.size(), "case": SYNCHRONIZE, "seconds": seconds}]


def measure_digits(ranks: int, epochs: int) -> list[Record]:
    """Run the example on all ranks; return the records of its trace."""
    with tempfile.TemporaryDirectory() as folder:
        trace = ["--trace-iterations", f"{folder}/trace.csv"]
        program = [sys.executable, str(DIGITS), "--epochs", str(epochs)]
        run_command([*hvdlite_run(ranks), *trace, *program], folder, environment())
        rows = [read_rows(str(file))[WARM_STEPS:] for file in sorted(Path(folder).glob("*.csv"))]
    iterations = [*zip(*rows, strict=True)]
    assert len(rows) == ranks and iterations
    return [
        {"ranks": ranks, "case": case, "seconds": median(figure(each) for each in iterations)}
        for case, figure in FIGURES.items()
    ]


def gap(iteration: Sequence[IterationRow]) -> float:
    """Return how long the slowest rank waits between the end of backward and its first segment."""
    return max(row.segments[0].start - (row.bp_end or 0.0) for row in iteration)


def gap_of_last(iteration: Sequence[IterationRow]) -> float:
    """Return how long nothing is computed or reduced on any rank before the first segment."""
    started = max(row.segments[0].start for row in iteration)
    return started - max(row.bp_end or 0.0 for row in iteration)


def first_segment(iteration: Sequence[IterationRow]) -> float:
    """Return how long the first segment takes on the slowest rank."""
    return max(row.segments[0].end - row.segments[0].start for row in iteration)


def after_last(iteration: Sequence[IterationRow]) -> float:
    """Return how long the slowest rank waits between its last segment and the optimizer."""
    return max(
        row.iteration_end - (row.optimizer_time or 0.0) - row.segments[-1].end for row in iteration
    )


FIGURES: dict[str, Callable[[Sequence[IterationRow]], float]] = {
    GAP: gap,
    GAP_OF_LAST: gap_of_last,
    SEGMENT: first_segment,
    AFTER: after_last,
}


def print_table(records: Sequence[Record]) -> None:
    """Print a line for each figure and number of ranks."""
    rows = [[each["case"], str(each["ranks"]), str(Spread(**each["seconds"]))] for each in records]
    print()
    print(table(["", "ranks", "time"], rows))


def parse_arguments() -> argparse.Namespace:
    parser = make_parser("Where the time of small models goes.", "small_models", [2])
    parser.add_argument("--steps", type=int, default=400, help="of the 16 gradients, in each job")
    parser.add_argument("--epochs", type=int, default=6, help="of the example, in each job")
    add_job_options(parser, rounds=3)
    return parse(parser, "1 job of each, 10 seconds", rounds=1, steps=100, epochs=3)


def main() -> None:
    args = parse_arguments()
    records: list[Record] = []
    for ranks in args.ranks:
        say(f"{ranks} ranks")
        ways = {
            "gradients": lambda ranks=ranks: run_ranks(measure_gradients, ranks, args.steps),
            "digits": lambda ranks=ranks: measure_digits(ranks, args.epochs),
        }
        for jobs in in_turns(ways, args.rounds).values():
            records += summarize(jobs)
    print_table(records)
    finish(args.json, records, [])


if __name__ == "__main__":
    main()
