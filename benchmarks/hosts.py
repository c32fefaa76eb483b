"""Two simulated hosts over TCP and over MPI: init, allreduce, idle CPU, and other libraries.

    python benchmarks/hosts.py                             # no limit of the link, one rank a host
    python benchmarks/hosts.py --gbit 1 --ranks-per-host 2
    python benchmarks/hosts.py --gbit 1 --streams 1 2 4 --transports tcp
    python benchmarks/hosts.py --gbit 1 --entries 'hvdlite ring' MPI_Allreduce gloo

See `simulated_hosts` for what it needs. Each entry and transport runs in jobs of its own, which are
launched in turns. A host has to send every byte of the tensor once (of bfloat16 half as many): that
is the bound, without the headers of TCP and IP, for which a link needs another 4.4 % of its time.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from collectives import SIZES
from jobs import Record, in_turns, summarize
from measuring import HVDLITE_RANKS, Ranks, Spread, Way, interleave, make_parser, table, write
from peers import GlooRanks, Mpi
from simulated_hosts import MPI, TCP, TwoHosts, add_link_options, describe, two_hosts

GRADIENT_ELEMENTS = 1 << 20  # What is compressed is compressed gradient by gradient.
SETTLE_SECONDS = 1.0  # Before idle CPU is measured.
ALL_SIZES = [name for name, nbytes in SIZES.items() if nbytes]
INIT, IDLE = "init", "idle CPU"
Array = np.ndarray[Any, Any]
MakeWay = Callable[[Array], Way]


# -- what the ranks do


def hvdlite_ranks(meeting: Path, size: int) -> Ranks:
    """Connect the ranks by hvdlite."""
    import hvdlite.numpy as hvd

    hvd.init()
    return HVDLITE_RANKS


def hvdlite_way(array: Array) -> Way:
    """Return an allreduce by hvdlite."""
    import hvdlite.numpy as hvd

    return lambda: hvd.allreduce_(array, name=f"data.{len(array)}", op=hvd.Sum)


def bfloat16_way(compress: bool, array: Array) -> Way:
    """Return an allreduce by hvdlite of bfloat16 gradients, or of float32 ones compressed to it."""
    import torch

    import hvdlite.torch as hvd

    gradients = torch.from_numpy(array).split(GRADIENT_ELEMENTS)
    given = [gradient.bfloat16() for gradient in gradients]
    name, cast = f"data.{len(array)}", hvd.Compression.bf16.compress_into

    def reduce() -> None:
        packed = [cast(memory, each) for memory, each in zip(given, gradients, strict=True)]
        hvd.grouped_allreduce_(packed, name=name, op=hvd.Sum)
        for gradient, each in zip(gradients, packed, strict=True):
            gradient.copy_(each)

    return reduce if compress else lambda: hvd.grouped_allreduce_(given, name=name, op=hvd.Sum)


def mpi_way(array: Array) -> Way:
    """Return the blocking allreduce of MPI."""
    peer = Mpi()
    return lambda: peer.starts["allreduce"](array, array, "data")


def gloo_ranks(meeting: Path, size: int) -> Ranks:
    """Connect the ranks by torch.distributed over gloo."""
    os.environ["GLOO_SOCKET_IFNAME"] = next(n for _, n in socket.if_nameindex() if n != "lo")
    return GlooRanks(meeting, size)


def gloo_way(array: Array) -> Way:
    """Return the allreduce of torch.distributed over gloo."""
    import torch
    import torch.distributed as dist

    tensor = torch.from_numpy(array)
    return lambda: dist.all_reduce(tensor)


class Entry(NamedTuple):
    """What is measured: how its ranks are connected, its allreduce, and what it runs over."""

    connect: Callable[[Path, int], Ranks]  # Is given a file for the meeting, and the ranks.
    make_way: MakeWay  # Is given the tensor.
    transports: tuple[str, ...] = (TCP, MPI)
    allreduce: str = ""  # HVDLITE_ALLREDUCE
    sent: float = 1  # Bytes that have to be sent for each byte of the tensor.


HVDLITE = "hvdlite"  # Its start and its idle CPU are measured, too.
ENTRIES = {
    HVDLITE: Entry(hvdlite_ranks, hvdlite_way),
    "hvdlite hierarchical": Entry(hvdlite_ranks, hvdlite_way, allreduce="hierarchical"),
    "hvdlite ring": Entry(hvdlite_ranks, hvdlite_way, allreduce="ring"),
    "hvdlite mpi": Entry(hvdlite_ranks, hvdlite_way, (MPI,), "mpi"),
    "hvdlite, bfloat16": Entry(hvdlite_ranks, partial(bfloat16_way, False), sent=0.5),
    "hvdlite, bf16 compression": Entry(hvdlite_ranks, partial(bfloat16_way, True), sent=0.5),
    "MPI_Allreduce": Entry(lambda meeting, size: Mpi(), mpi_way, (MPI,)),
    "gloo": Entry(gloo_ranks, gloo_way, (TCP,)),
}


def rank_main(plan: argparse.Namespace) -> None:
    """Run one rank of a job; rank 0 writes what it has measured."""
    (name,) = plan.entries
    meeting = plan.rank_file.with_suffix(".meeting")
    start = time.perf_counter()
    ranks = ENTRIES[name].connect(meeting, 2 * plan.ranks_per_host)
    found = {INIT: time.perf_counter() - start} if name == HVDLITE else {}
    for size in plan.sizes:
        found[size] = allreduce_seconds(ENTRIES[name].make_way, size, plan.seconds, ranks)
    if name == HVDLITE and plan.idle_seconds:
        found[IDLE] = idle_share(plan.idle_seconds, ranks)
    if ranks.rank == 0:
        records = [{"entry": name, "what": what, "seconds": s} for what, s in found.items()]
        plan.rank_file.write_text(json.dumps(records))


def allreduce_seconds(make_way: MakeWay, size: str, seconds: float, ranks: Ranks) -> float:
    """Return the median of allreduces during `seconds`, and of a few at least; collective."""
    way = make_way(np.zeros(SIZES[size] // 4, np.float32))
    way()  # Connections are made, and memory is touched.
    (measured,) = interleave({size: way}, seconds, ranks).values()
    return median(measured)


def idle_share(seconds: float, ranks: Ranks) -> float:
    """Return the seconds of CPU a second while nothing is enqueued, highest of all ranks."""
    ranks.barrier()
    time.sleep(SETTLE_SECONDS)
    used = time.process_time()
    time.sleep(seconds)
    (share,) = ranks.largest([(time.process_time() - used) / seconds])
    return share


# -- around them


class Column(NamedTuple):
    """How jobs are connected: a column of the table."""

    transport: str
    variables: Mapping[str, str]


def make_columns(args: argparse.Namespace) -> dict[str, Column]:
    """Return the columns by name; `args.streams` makes several of tcp."""
    columns: dict[str, Column] = {}
    for transport in args.transports:
        if transport == TCP and args.streams:
            for count in args.streams:
                name = f"tcp, {count} stream{'s' * (count > 1)}"
                columns[name] = Column(TCP, {"HVDLITE_TCP_STREAMS": str(count)})
        else:
            columns[transport] = Column(transport, {})
    return columns


def make_jobs(
    hosts: TwoHosts, entries: Sequence[str], columns: Mapping[str, Column]
) -> Iterator[tuple[tuple[str, str], Callable[[], list[Record]]]]:
    """Yield a function that runs a job, for each entry and each column that it runs over."""
    for name, (label, column) in product(entries, columns.items()):
        entry = ENTRIES[name]
        if column.transport in entry.transports:
            variables = {"HVDLITE_ALLREDUCE": entry.allreduce} if entry.allreduce else {}
            variables |= column.variables
            words = [*sys.argv[1:], "--entries", name]
            job = partial(hosts.measure, column.transport, __file__, words, **variables)
            yield (name, label), job


def measure(hosts: TwoHosts, args: argparse.Namespace) -> list[Record]:
    """Return a record for each figure, with what it depends on."""
    jobs = in_turns(dict(make_jobs(hosts, args.entries, make_columns(args))), args.rounds)
    link = {name: getattr(args, name) for name in ("gbit", "delay_ms", "ranks_per_host")}
    records = []
    for (_, column), runs in jobs.items():
        for record in summarize(runs):
            size = {"mib": SIZES[record["what"]] / 2**20} if record["what"] in SIZES else {}
            records.append(link | size | {"transport": column} | record)
    return records


def print_table(records: Sequence[Record]) -> None:
    """Print a row for each figure, and a column for each transport."""
    labels = list(dict.fromkeys(record["transport"] for record in records))
    rows: dict[str, dict[str, Record]] = {}
    for record in records:
        entry, what = record["entry"], record["what"]
        name = what if entry == HVDLITE else f"{entry}, {what}"
        rows.setdefault(name, {})[record["transport"]] = record
    first, *others = labels
    head = ["", *labels, *(f"{first} / {other}" for other in others), f"bound / {first}"]
    print(table(head, [[name, *cells(found, labels)] for name, found in rows.items()]))


def cells(found: Mapping[str, Record], labels: Sequence[str]) -> Iterator[str]:
    """Yield the figures of a row, the ratios of the first to the others, and the bound's share."""
    spreads = {label: Spread(**record["seconds"]) for label, record in found.items()}
    share = any(record["what"] == IDLE for record in found.values())
    for label in labels:
        spread = spreads.get(label)
        yield f"{spread.median:.3%}" if spread and share else str(spread or "")
    first, *others = map(spreads.get, labels)
    for other in others:
        yield f"{first.median / other.median:.2f}" if first and other and not share else ""
    bound = bound_seconds(found[labels[0]]) if first else 0
    yield f"{bound / first.median:.1%}" if first and bound > 1e-3 else ""


def bound_seconds(record: Record) -> float:
    """Return the time in which a host can send the tensor once; 0 where there is no limit."""
    if not record["gbit"]:
        return 0
    mib = float(record.get("mib", 0)) * ENTRIES[record["entry"]].sent
    return mib * 2**20 * 8 / (record["gbit"] * 1e9)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser("Two simulated hosts over TCP and over MPI.", "hosts")
    add = parser.add_argument
    add("--entries", nargs="+", choices=ENTRIES, default=[HVDLITE], metavar="ENTRY",
        help=", ".join(ENTRIES))  # fmt: skip
    add("--sizes", nargs="+", choices=ALL_SIZES, default=["4 B", "16 MiB", "64 MiB"],
        metavar="SIZE", help=", ".join(ALL_SIZES))  # fmt: skip
    add("--transports", nargs="+", choices=(TCP, MPI), default=[TCP, MPI])
    add("--streams", type=int, nargs="+", default=[], help="of TCP: a column for each number")
    add("--rounds", type=int, default=3, help="jobs of each entry and column, in turns")
    add("--seconds", type=float, default=0.5, help="of a job, for each size")
    add("--idle-seconds", type=float, default=10, help="in which idle CPU is measured; 0: not")
    add_link_options(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.rank_file:
        rank_main(args)
        return
    with two_hosts(args) as hosts:
        records = measure(hosts, args)
    print(f"{describe(args, hosts.delayed_by)}, {args.rounds} jobs each\n")
    print_table(records)
    write(args.json, records)


if __name__ == "__main__":
    main()
