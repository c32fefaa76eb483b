"""Collectives between many simulated hosts: the network model, and the truth.

    python benchmarks/between_hosts.py                       # 4, 8 and 16 hosts of one rank
    python benchmarks/between_hosts.py --tensors 10 161      # and steps of so many tensors
    python benchmarks/between_hosts.py --hosts 8 --ranks-per-host 2 --delay-ms 2

Hosts are network namespaces on this machine, joined by a `switch` that delays every packet. Their
ranks share its cores, so that only figures count in which the delay and the limit of the links
take most of the time. In each job the ranks measure the model as ``python -m hvdlite.bench model``
does, then allreduce by every algorithm at every size, of one tensor and of steps of many. It needs
root, iproute2 and the extra test.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from jobs import run_command
from measuring import duration, make_parser, say, table, write
from simulated_hosts import ROOT, add_qdisc, ip
from switch import switch

ONE, STEP = "one allreduce", "a step of tensors"
SIZES = (512, 64 << 10, 1 << 20, 4 << 20)
NETWORK = "10.213.78"


@contextmanager
def hosts(number: int, delay_ms: float, mbit: float) -> Iterator[list[tuple[str, str]]]:
    """Yield the names and addresses of new namespaces, which end with the context."""
    names = [f"hvdlite{os.getpid()}n{each}" for each in range(1, number + 1)]
    devices = [f"hvs{os.getpid() % 100000}n{each}" for each in range(1, number + 1)]
    with ExitStack() as stack:
        stack.enter_context(switch(devices, delay_ms / 1000))
        made = []
        for each, (name, device) in enumerate(zip(names, devices, strict=True), 1):
            subprocess.run(["ip", "netns", "add", name], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            subprocess.run(["ip", "link", "set", device, "netns", name], check=True)
            ip(name, "address", "add", f"{NETWORK}.{each}/24", "dev", device)
            for up in ("lo", device):
                ip(name, "link", "set", up, "up")
            # A connection that was idle for a while would begin slowly again, for many of the long
            # round trips between these hosts.
            sysctl = ["sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0"]
            subprocess.run(["ip", "netns", "exec", name, *sysctl], check=True)
            rate = ("tbf", "rate", f"{mbit}mbit", "burst", "32kb", "latency", "100ms")
            if mbit and not add_qdisc(name, device, *rate):
                raise SystemExit("tc cannot limit the links: it needs tbf")
            made.append((name, f"{NETWORK}.{each}"))
        yield made


def rank_main(args: argparse.Namespace) -> None:
    """Measure as one rank; rank 0 writes the records."""
    import hvdlite.numpy as hvd
    from hvdlite.common.api.network_model import (
        compared_algorithms,
        compared_steps,
        measured_model,
    )
    from hvdlite.common.collectives.between_hosts.costs import ALLREDUCE, COSTS

    hvd.init()
    model = measured_model()
    compared = compared_algorithms(model, args.sizes, args.calls)
    steps = {
        (tensors, size): compared_steps(model, tensors, size, args.calls)
        for tensors in args.tensors for size in args.tensor_sizes
    }  # fmt: skip
    if hvd.rank() == 0:
        records: list[dict[str, Any]] = [
            {"kind": ONE, "bytes": size, "algorithm": name, "model": predicted, "seconds": measured,
             "chosen": chosen, "figures": dict(zip(model.names(), model.values, strict=True))}
            for size, times, chosen in compared
            for name, (predicted, measured) in zip(COSTS[ALLREDUCE], times, strict=True)
        ]  # fmt: skip
        records += [
            {"kind": STEP, "tensors": tensors, "bytes": size, "algorithm": name,
             "model": predicted, "seconds": measured}
            for (tensors, size), times in steps.items()
            for name, (predicted, measured) in times.items()
        ]  # fmt: skip
        args.rank_file.write_text(json.dumps(records))
    hvd.shutdown()


def measure(args: argparse.Namespace, number: int) -> list[dict[str, Any]]:
    """Run one job on so many hosts."""
    sys.path.append(str(ROOT))
    from tests.parallel.jobs import environment

    per_host = args.ranks_per_host
    with (
        tempfile.TemporaryDirectory() as folder,
        hosts(number, args.delay_ms, args.mbit) as made,
    ):
        file = Path(folder) / "measured.json"
        spelled = ",".join(f"{name}:{address}:{per_host}" for name, address in made)
        starter = [sys.executable, "-m", "tests.parallel.start_ranks", "--hosts", spelled]
        program = [sys.executable, __file__, *sys.argv[1:], "--rank-file", str(file)]
        environ = {**environment(), "HVDLITE_TRANSPORT": "tcp", "OMP_NUM_THREADS": "1"}
        run_command([*starter, str(number * per_host), *program], str(ROOT), environ)
        records = json.loads(file.read_text())
    link = {"hosts": number, "ranks": number * per_host, "delay_ms": args.delay_ms}
    return [link | {"mbit": args.mbit} | record for record in records]


def print_table(records: list[dict[str, Any]]) -> None:
    """Print a line for each number of hosts and each size: measured, and its ratio to the model."""
    names = list(dict.fromkeys(record["algorithm"] for record in records))
    rows: dict[tuple[int, int], list[str]] = {}
    chosen: dict[tuple[int, int], str] = {}
    for record in records:
        key = record["hosts"], record["bytes"]
        ratio = record["seconds"] / record["model"]
        rows.setdefault(key, []).append(f"{duration(record['seconds'])} ({ratio:.2f})")
        chosen[key] = record["chosen"]
    lines = [
        [str(number), f"{size / 1024:g} KiB", *cells, chosen[number, size]]
        for (number, size), cells in rows.items()
    ]
    print(table(["hosts", "size", *names, "chosen"], lines))


def print_steps(records: list[dict[str, Any]]) -> None:
    """Print a line for each step: measured, and the same ratio."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for record in records:
        of = f"{record['tensors']} x {record['bytes'] / 1024:g} KiB"
        cell = f"{duration(record['seconds'])} ({record['seconds'] / record['model']:.2f})"
        rows.setdefault((str(record["hosts"]), of), {})[record["algorithm"]] = cell
    if rows:
        names = [*next(iter(rows.values()))]
        print()
        print(table(["hosts", STEP, *names], [[*key, *row.values()] for key, row in rows.items()]))


def main() -> None:
    parser = make_parser("Algorithms of allreduce between simulated hosts.", "between_hosts")
    add = parser.add_argument
    add("--hosts", type=int, nargs="+", default=[4, 8, 16])
    add("--ranks-per-host", type=int, default=1)
    add("--delay-ms", type=float, default=5, help="each way")
    add("--mbit", type=float, default=200, help="a second, out of each host; 0: no limit")
    add("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    add("--tensors", type=int, nargs="*", default=(), help="of a step, which is one segment")
    add("--tensor-sizes", type=int, nargs="+", default=(4 << 10, 64 << 10), help="bytes of each")
    add("--calls", type=int, default=3, help="of each algorithm and size")
    add("--rank-file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_file:
        rank_main(args)
        return
    records = []
    for number in args.hosts:
        say(f"{number} hosts")
        records += measure(args, number)
    link = f"{args.mbit:g} Mbit/s" if args.mbit else "no limit"
    print(f"\n{link}, {args.delay_ms:g} ms each way, {args.ranks_per_host} ranks a host: "
          "measured (measured / model)\n")  # fmt: skip
    print_table([each for each in records if each["kind"] == ONE])
    print_steps([each for each in records if each["kind"] == STEP])
    write(args.json, records)


if __name__ == "__main__":
    main()
