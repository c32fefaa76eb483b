"""Allgather, reducescatter, broadcast and alltoall between simulated hosts: flat, and by hosts.

    python benchmarks/collectives_between_hosts.py                     # 2 and 3 hosts of 2 ranks
    python benchmarks/collectives_between_hosts.py --hosts 4 --sizes 512 4096

The hosts are those of `between_hosts`. Flat is HVDLITE_DATA_PLANE=ring: all ranks in one ring, as
if there were no hosts. Each way runs in jobs of its own, in turns. A size is that of the results of
an allgather, of the input of a reducescatter, and of what each rank sends in an alltoall.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from between_hosts import hosts
from jobs import Record, in_turns, run_command, summarize
from measuring import HVDLITE_RANKS, Spread, Way, interleave, make_parser, say, table, write
from simulated_hosts import ROOT

SIZES = (4 << 10, 64 << 20)
WAYS = {"flat": "ring", "hierarchical": "auto"}


def ways(size: int) -> dict[str, Way]:
    """Return the collectives of `size` bytes, once each has been checked."""
    import hvdlite.numpy as hvd

    count, ranks, rank = size // 4, hvd.size(), hvd.rank()
    whole, rows = np.full(count, rank, np.float32), np.full(count // ranks, rank, np.float32)
    sent = whole[: count // ranks * ranks]
    found: dict[str, Any] = {
        "allgather": lambda: hvd.allgather(rows, name=f"gather.{size}"),
        "reducescatter": lambda: hvd.reducescatter(whole, op=hvd.Sum, name=f"scatter.{size}"),
        "broadcast": lambda: hvd.broadcast(whole, root_rank=0, name=f"broadcast.{size}"),
        "alltoall": lambda: hvd.alltoall(sent, name=f"exchange.{size}"),
    }
    expected = np.repeat(np.arange(ranks), count // ranks)
    np.testing.assert_array_equal(found["allgather"](), expected)
    np.testing.assert_array_equal(found["alltoall"](), expected)
    assert np.all(found["reducescatter"]() == sum(range(ranks)))
    assert not np.any(found["broadcast"]())
    return found


def rank_main(args: argparse.Namespace) -> None:
    """Measure as one rank; rank 0 writes the records."""
    import hvdlite.numpy as hvd

    hvd.init()
    records = []
    for size in args.sizes:
        measured = interleave(ways(size), args.seconds, least=args.calls)
        records += [
            {"bytes": size, "collective": name, "seconds": median(seconds)}
            for name, seconds in measured.items()
        ]
    if HVDLITE_RANKS.rank == 0:
        args.rank_file.write_text(json.dumps(records))
    hvd.shutdown()


def run_job(made: Sequence[tuple[str, str]], per_host: int, plane: str) -> list[Record]:
    """Run one job on the hosts `made`."""
    from tests.parallel.jobs import environment

    spelled = ",".join(f"{name}:{address}:{per_host}" for name, address in made)
    starter = [sys.executable, "-m", "tests.parallel.start_ranks", "--hosts", spelled]
    environ = {**environment(), "HVDLITE_TRANSPORT": "tcp", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        program = [sys.executable, __file__, *sys.argv[1:], "--rank-file", str(file)]
        environ["HVDLITE_DATA_PLANE"] = plane
        run_command([*starter, str(len(made) * per_host), *program], str(ROOT), environ)
        records: list[Record] = json.loads(file.read_text())
    return records


def measure(args: argparse.Namespace, number: int) -> list[Record]:
    """Return a record for each figure of so many hosts."""
    sys.path.append(str(ROOT))
    with hosts(number, args.delay_ms, args.mbit) as made:
        run = partial(run_job, made, args.ranks_per_host)
        jobs = in_turns({way: partial(run, plane) for way, plane in WAYS.items()}, args.rounds)
    link = {"hosts": number, "ranks": number * args.ranks_per_host}
    link |= {"delay_ms": args.delay_ms, "mbit": args.mbit}
    return [link | {"way": way} | each for way, runs in jobs.items() for each in summarize(runs)]


def print_table(records: Sequence[Record]) -> None:
    """Print a line for each collective, size and number of hosts."""
    rows: dict[tuple[Any, ...], dict[str, Spread]] = {}
    for each in records:
        key = f"{each['hosts']} x {each['ranks'] // each['hosts']}", each["collective"]
        size = f"{each['bytes'] / 1024:g} KiB"
        rows.setdefault((*key, size), {})[each["way"]] = Spread(**each["seconds"])
    lines = [
        [
            *key,
            *map(str, found.values()),
            f"{found['hierarchical'].median / found['flat'].median:.2f}",
        ]
        for key, found in rows.items()
    ]
    print(table(["hosts", "collective", "size", *WAYS, "hierarchical / flat"], lines))


def main() -> None:
    parser = make_parser("Collectives between simulated hosts.", "collectives_between_hosts")
    add = parser.add_argument
    add("--hosts", type=int, nargs="+", default=[2, 3])
    add("--ranks-per-host", type=int, default=2)
    add("--delay-ms", type=float, default=0.2, help="each way")
    add("--mbit", type=float, default=1000, help="a second, out of each host; 0: no limit")
    add("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    add("--calls", type=int, default=2, help="of each collective and size, at least")
    add("--seconds", type=float, default=0.5, help="for each size of a job")
    add("--rounds", type=int, default=3, help="jobs of each way, in turns")
    add("--rank-file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_file:
        rank_main(args)
        return
    records = []
    for number in args.hosts:
        say(f"{number} hosts")
        records += measure(args, number)
    print(f"\n{args.mbit:g} Mbit/s, {args.delay_ms:g} ms each way, {args.rounds} jobs each\n")
    print_table(records)
    write(args.json, records)


if __name__ == "__main__":
    main()
