"""What a parameter server costs, beside allreduce, and where it is the better choice.

    python benchmarks/parameter_server.py     # 3 minutes; --only step tiny ... for parts, each of
                                              # which takes less than 90 seconds
    python benchmarks/parameter_server.py --quick

Needs the extras torch and test (for the part "hosts": root, iproute2 and tc, else it is left
out). Every part starts clusters of processes on this machine:

- step: a step of 97.5 MiB (ResNet-50, SGD) with 2 workers and 1 server, in sync, through shared
  memory, in turns with allreduce by hvdlite among 2 ranks.
- sockets: the same step by Unix sockets (ipc) and TCP, without shared memory.
- tiny: a step of 1,000 parameters of 16 elements, and of 4 KiB.
- calls: raw pushes and pulls of 4 KiB, of 1,000 tables and of rows, in turns with gloo's send and
  recv and torch RPC between two processes, which do the same.
- hosts: 4 workers and 4 servers on 8 simulated hosts, beside what the links allow; and the step
  after a backward that takes twice as long as the bytes on a link, during which they are pushed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import make_parser, parse, say, table, write
from ps_calls import measure_calls
from ps_cluster import Rows
from ps_hosts import measure_hosts
from ps_steps import measure_sockets, measure_step, measure_tiny, train_by_allreduce

PARTS: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "step": measure_step, "sockets": measure_sockets, "tiny": measure_tiny,
    "calls": measure_calls, "hosts": measure_hosts,
}  # fmt: skip


def main() -> None:
    """Measure the parts that are asked for, print a table and write all figures."""
    parser = make_parser(__doc__ or "", "parameter_server")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--steps", type=int, default=15, help="of a job")
    parser.add_argument("--rounds", type=int, default=2, help="jobs of each way, in turns")
    parser.add_argument("--mbit", type=float, default=1000.0, help="of each link in `hosts`")
    parser.add_argument("--mebibytes", type=int, default=64, help="that a step sends in `hosts`")
    parser.add_argument("--allreduce", type=Path, help=argparse.SUPPRESS)
    args = parse(parser, "fewer steps", steps=6, rounds=1, mebibytes=8)
    if args.allreduce is not None:
        train_by_allreduce(args)
        return
    rows: Rows = []
    records: list[dict[str, Any]] = []
    for part in args.only:
        say(part)
        found = PARTS[part](args)
        rows += found
        for what, figure in found:
            say(f"  {what}: {figure}")
        records += [{"part": part, "what": what, "figure": figure} for what, figure in found]
    print(table(("", "median (quartiles)"), rows))
    write(args.json, records)


if __name__ == "__main__":
    main()
