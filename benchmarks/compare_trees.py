"""Two versions of hvdlite, each in its own environment, measured alternately in one sitting.

    python benchmarks/compare_trees.py --python-a old/bin/python --python-b new/bin/python
    python benchmarks/compare_trees.py --python-a old/bin/python          # against this interpreter

In each environment hvdlite is installed, from a checkout or from a wheel. The programs of this
folder run with either of them, because they use its public API alone: allreduce as collectives.py
measures it, and the start of a job as start.py does. Jobs of both versions alternate.

Prints the median of each version's jobs (in brackets the least and the most of them) and B / A: the
ratio of the medians, and the least and the greatest ratio of two jobs of one round.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import start
from jobs import Record, add_job_options, hvdlite_run, in_turns, run_job, summarize
from measuring import Spread, make_parser, say, table, write

COLLECTIVES = str(Path(__file__).with_name("collectives.py"))
SIZES = ["4 B", "4 KiB", "64 KiB", "1 MiB", "64 MiB", "ResNet-50"]
ENTRIES = ["hvdlite numpy", "hvdlite torch"]
START = "start of a job"


def describe(python: str) -> str:
    """Return the version and the place of the hvdlite that `python` imports."""
    program = "import hvdlite; print(hvdlite.__version__, hvdlite.__file__)"
    with tempfile.TemporaryDirectory() as empty:  # `-c` imports from the folder it runs in
        command = [python, "-c", program]
        done = subprocess.run(command, cwd=empty, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def start_job(ranks: int, python: str) -> list[Record]:
    """Start a job; return the record of the time to the end of its first allreduce."""
    launcher = [*hvdlite_run(ranks, python), python]
    return [{"size": START, "seconds": start.time_job(launcher, start.HVDLITE)}]


def make_ways(
    ranks: int, args: argparse.Namespace
) -> dict[tuple[str, str], Callable[[], list[Record]]]:
    """Return the jobs of all entries; the jobs of A and B alternate."""
    ways: dict[tuple[str, str], Callable[[], list[Record]]] = {}
    common = ["--ranks", str(ranks), "--seconds", str(args.seconds), "--sizes", *args.sizes]
    for entry, (name, python) in product([*args.entries, ""], versions(args).items()):
        words = [*common, "--entries", entry]
        job = partial(run_job, COLLECTIVES, words, ranks, python)
        ways[entry, name] = job if entry else partial(start_job, ranks, python)
    return ways


def versions(args: argparse.Namespace) -> dict[str, str]:
    """Return the interpreters of both versions."""
    return {"A": args.python_a, "B": args.python_b}


def compare(
    case: Record, a: Sequence[Sequence[Record]], b: Sequence[Sequence[Record]]
) -> Iterator[Record]:
    """Yield a record for each figure of the jobs `a` and `b`."""
    for old, new in zip(summarize(a), summarize(b), strict=True):
        ratios = [y / x for x, y in zip(old["jobs"], new["jobs"], strict=True)]
        ratio = {"low": min(ratios), "high": max(ratios)}
        ratio["median"] = new["seconds"]["median"] / old["seconds"]["median"]
        figures = {"a": old["seconds"], "b": new["seconds"], "ratio": ratio}
        yield {**case, "what": old["size"], **figures}


def row(record: Record) -> list[str]:
    """Return a line of the table."""
    ratio = record["ratio"]
    return [
        str(record["ranks"]),
        record["entry"],
        record["what"],
        str(Spread(**record["a"])),
        str(Spread(**record["b"])),
        f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
    ]


def main() -> None:
    parser = make_parser("Two versions of hvdlite, alternately.", "compare_trees", [2])
    parser.add_argument("--python-a", required=True, metavar="PYTHON")
    parser.add_argument("--python-b", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--entries", nargs="+", choices=ENTRIES, default=ENTRIES, metavar="ENTRY")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="SIZE")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a job, for each size")
    add_job_options(parser)
    args = parser.parse_args()
    for name, python in versions(args).items():
        print(f"{name}: {describe(python)}")
    records: list[Record] = []
    for ranks in args.ranks:
        say(f"{ranks} ranks")
        jobs = in_turns(make_ways(ranks, args), args.rounds)
        for entry in [*args.entries, ""]:
            case = {"ranks": ranks, "entry": entry}
            records += compare(case, jobs[entry, "A"], jobs[entry, "B"])
    print(f"\n{table(['ranks', '', 'allreduce', 'A', 'B', 'B / A'], map(row, records))}")
    write(args.json, records)


if __name__ == "__main__":
    main()
