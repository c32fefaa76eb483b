"""TCP beside MPI between two simulated hosts: latency, bandwidth, the time of init, idle CPU.

    python benchmarks/transports.py             # no limit of the link, one rank a host
    python benchmarks/transports.py --gbit 1 --ranks-per-host 2

Needs what `hosts.py` needs. Over TCP the ranks are started as they are and meet at rank 0; over
MPI mpirun starts them. Both run in turns. The bound is the time in which a host can send the tensor
once, with the headers of TCP and IP (5 %).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from hosts import add_link_options, hosts
from jobs import in_turns
from measuring import Spread, make_parser, table, write

IDLE_SECONDS = 10
PORT = 29511
HEADERS = 1.05
INIT, IDLE = "init", "idle CPU"
SIZES = {"4 B": 4, "16 MiB": 16 << 20, "64 MiB": 64 << 20}


def rank_main(file: Path) -> None:
    """Run one rank; rank 0 writes what it has measured, in seconds (idle CPU: a share)."""
    import hvdlite.numpy as hvd

    start = time.perf_counter()
    hvd.init()
    found = {INIT: time.perf_counter() - start}
    for name, nbytes in SIZES.items():
        found[name] = allreduce_seconds(hvd, nbytes)
    hvd.barrier()
    time.sleep(1)
    used = time.process_time()
    time.sleep(IDLE_SECONDS)
    found[IDLE] = (time.process_time() - used) / IDLE_SECONDS
    hvd.barrier()
    if hvd.rank() == 0:
        file.write_text(json.dumps([{"entry": name, "seconds": v} for name, v in found.items()]))
    hvd.shutdown()


def allreduce_seconds(hvd: Any, nbytes: int) -> float:
    """Return the median over some allreduces, after the first ones."""
    array, times = np.zeros(nbytes // 4, np.float32), []
    for _ in range(300 if nbytes < 1 << 16 else 8):
        hvd.barrier()
        start = time.perf_counter()
        hvd.allreduce_(array, name="data", op=hvd.Sum)
        times.append(time.perf_counter() - start)
    return median(times[3:])


def tcp_job(ranks_per_host: int) -> Any:
    """Start the ranks by themselves; return what rank 0 has measured."""
    from tests.parallel.hosts import ADDRESSES, NAMES
    from tests.parallel.jobs import environment

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        file, size = Path(folder) / "measured.json", 2 * ranks_per_host
        ranks = []
        for rank in range(size):
            host, local = divmod(rank, ranks_per_host)
            environ = environment(
                OMP_NUM_THREADS="1", HVDLITE_RENDEZVOUS=f"{ADDRESSES[0]}:{PORT}",
                HVDLITE_RANK=str(rank), HVDLITE_SIZE=str(size),
                HVDLITE_LOCAL_RANK=str(local), HVDLITE_LOCAL_SIZE=str(ranks_per_host),
                HVDLITE_CROSS_RANK=str(host), HVDLITE_CROSS_SIZE="2",
                HVDLITE_TRANSPORT="tcp", HVDLITE_SECRET="benchmark",
            )  # fmt: skip
            command = ["ip", "netns", "exec", NAMES[host], sys.executable, __file__]
            process = subprocess.Popen([*command, "--rank-file", str(file)], env=environ)
            ranks.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in ranks:
            if process.wait(300):
                raise SystemExit(f"a rank has failed: {process.returncode}")
        return json.loads(file.read_text())


def mpi_job(job: Callable[[str, Sequence[str]], Any]) -> Any:
    """Let mpirun start the ranks; return what rank 0 has measured."""
    return job(__file__, ["--transport", "mpi"])


def print_columns(found: dict[str, dict[str, Spread]], gbit: float) -> None:
    """Print a row for each figure, and a column for each transport."""
    rows = []
    for name in found["tcp"]:
        tcp, mpi = found["tcp"][name], found["mpi"][name]
        row = [name, *map(str, (tcp, mpi)), f"{tcp.median / mpi.median:.2f}"]
        if name == IDLE:
            row[1:3] = [f"{each.median:.3%}" for each in (tcp, mpi)]
        bound = SIZES.get(name, 0) * 8 * HEADERS / (gbit * 1e9) if gbit else 0
        rows.append([*row, f"{bound / tcp.median:.0%}" if bound > 1e-3 else ""])
    print(table(["", "tcp", "mpi", "tcp / mpi", "bound / tcp"], rows))


def main() -> None:
    parser = make_parser("TCP beside MPI between two simulated hosts.", "transports")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each transport, in turns")
    parser.add_argument("--transport", help=argparse.SUPPRESS)
    add_link_options(parser, ranks=1, delay_ms=0)
    parser.set_defaults(gbit=0.0)
    args = parser.parse_args()
    if args.rank_file:
        if args.transport:
            os.environ["HVDLITE_TRANSPORT"] = args.transport
        rank_main(args.rank_file)
        return
    with hosts(args) as (job, _):
        ways = {"tcp": partial(tcp_job, args.ranks_per_host), "mpi": partial(mpi_job, job)}
        jobs = in_turns(ways, args.rounds)
    found = {
        way: {
            each["entry"]: Spread.extremes([run[i]["seconds"] for run in runs])
            for i, each in enumerate(runs[0])
        }
        for way, runs in jobs.items()
    }
    limit = f"{args.gbit:g} Gbit/s" if args.gbit else "no limit of the link"
    print(f"{limit}, {args.ranks_per_host} ranks a host, {args.rounds} jobs each\n")
    print_columns(found, args.gbit)
    records = [
        {"transport": way, "entry": name, "seconds": vars(spread)}
        for way, entries in found.items()
        for name, spread in entries.items()
    ]
    line = {"gbit": args.gbit, "ranks_per_host": args.ranks_per_host}
    write(args.json, [line | record for record in records])


if __name__ == "__main__":
    main()
