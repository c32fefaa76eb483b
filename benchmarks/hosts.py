"""Allreduce between two simulated hosts with two ranks each, and a slow link between them.

    python benchmarks/hosts.py                  # 64 MiB of float32, 1 Gbit/s, 1 ms each way

Needs root, iproute2 and the extra test: the hosts are network namespaces, made as the tests make
them, and tc shapes the link; where the kernel has no netem, `cable` delays what goes over it. Each
entry runs in jobs of its own, which are launched in turns. A host has to send every byte of the
tensor once: that is the bound, without the headers of TCP and IP (5 %). `transports.py` compares
TCP with MPI on the same hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from cable import cable
from jobs import Record, in_turns, summarize
from measuring import HVDLITE_RANKS, Ranks, Spread, Way, interleave, make_parser, table, write
from peers import GlooRanks, Mpi

ROOT = Path(__file__).parent.parent
GRADIENT_ELEMENTS = 1 << 20  # what is compressed is compressed gradient by gradient
Job = Callable[[str, Sequence[str]], Any]  # script, options -> what its rank 0 has measured
Array = np.ndarray[Any, Any]


# -- what the ranks do


def hvdlite_way(setting: str, array: Array, meeting: Path, size: int) -> tuple[Ranks, Way]:
    """Return an allreduce by hvdlite with HVDLITE_ALLREDUCE=setting, which init reads."""
    import hvdlite.numpy as hvd

    os.environ["HVDLITE_ALLREDUCE"] = setting
    hvd.init()
    return HVDLITE_RANKS, lambda: hvd.allreduce_(array, name="data", op=hvd.Sum)


def bfloat16_way(compress: bool, array: Array, meeting: Path, size: int) -> tuple[Ranks, Way]:
    """Return an allreduce by hvdlite of bfloat16 gradients, or of float32 ones compressed to it."""
    import torch

    import hvdlite.torch as hvd

    gradients = torch.from_numpy(array).split(GRADIENT_ELEMENTS)
    given = [gradient.bfloat16() for gradient in gradients]
    cast = hvd.Compression.bf16.compress_into

    def reduce() -> None:
        packed = [cast(memory, each) for memory, each in zip(given, gradients, strict=True)]
        hvd.grouped_allreduce_(packed, name="data", op=hvd.Sum)
        for gradient, each in zip(gradients, packed, strict=True):
            gradient.copy_(each)

    hvd.init()
    if compress:
        return HVDLITE_RANKS, reduce
    return HVDLITE_RANKS, lambda: hvd.grouped_allreduce_(given, name="data", op=hvd.Sum)


def mpi_way(array: Array, meeting: Path, size: int) -> tuple[Ranks, Way]:
    """Return the blocking allreduce of MPI."""
    peer = Mpi()
    return peer, lambda: peer.starts["allreduce"](array, array, "data")


def gloo_way(array: Array, meeting: Path, size: int) -> tuple[Ranks, Way]:
    """Return the allreduce of torch.distributed over gloo."""
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = next(n for _, n in socket.if_nameindex() if n != "lo")
    tensor = torch.from_numpy(array)
    return GlooRanks(meeting, size), lambda: dist.all_reduce(tensor)


# Each is given the tensor, the file in which the ranks may meet, and their number.
WAYS: dict[str, Callable[[Array, Path, int], tuple[Ranks, Way]]] = {
    "hvdlite hierarchical": partial(hvdlite_way, "hierarchical"),
    "hvdlite ring": partial(hvdlite_way, "ring"),
    "hvdlite mpi": partial(hvdlite_way, "mpi"),
    "hvdlite, bfloat16": partial(bfloat16_way, False),
    "hvdlite, bf16 compression": partial(bfloat16_way, True),
    "MPI_Allreduce": mpi_way,
    "gloo": gloo_way,
}


def rank_main(plan: argparse.Namespace) -> None:
    """Run one rank of a job; rank 0 writes the median of a few allreduces."""
    (entry,) = plan.entries
    array = np.zeros(plan.mib << 18, np.float32)
    meeting = plan.rank_file.with_suffix(".meeting")
    ranks, way = WAYS[entry](array, meeting, 2 * plan.ranks_per_host)
    way()  # connections are made, and memory is touched
    (seconds,) = interleave({entry: way}, 0, ranks, least=2).values()
    if ranks.rank == 0:
        record = {"entry": entry, "mib": plan.mib, "seconds": median(seconds)}
        plan.rank_file.write_text(json.dumps([record]))


# -- around them


def ip(namespace: str, *words: str) -> None:
    """Run ip in a namespace."""
    subprocess.run(["ip", "-n", namespace, *words], check=True)


def add_qdisc(namespace: str, device: str, *words: str) -> bool:
    """Shape the traffic that leaves through `device`; return whether the kernel can."""
    command = ["ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, "root"]
    return not subprocess.run([*command, *words], capture_output=True, check=False).returncode


@contextmanager
def link(args: argparse.Namespace) -> Iterator[str]:
    """Shape the link between the hosts as `args` say; yield what makes the delay.

    netem does, where the kernel has it. Otherwise the link is replaced by a `cable`.
    """
    from tests.parallel.hosts import ADDRESSES, DEVICES, NAMES

    if not args.gbit:
        yield "nobody"
        return
    rate = ("rate", f"{args.gbit}gbit")
    netem = ("netem", "delay", f"{args.delay_ms}ms", *rate, "limit", "10000")
    hosts = list(zip(NAMES, DEVICES, ADDRESSES, strict=True))
    if all(add_qdisc(name, device, *netem) for name, device, _ in hosts):
        yield "netem"
        return
    with ExitStack() as stack:
        if args.delay_ms:
            ip(NAMES[0], "link", "del", DEVICES[0])
            stack.enter_context(cable(DEVICES, args.delay_ms / 1000))
            for name, device, address in hosts:
                subprocess.run(["ip", "link", "set", device, "netns", name], check=True)
                ip(name, "address", "add", f"{address}/24", "dev", device)
                ip(name, "link", "set", device, "up")
        for name, device, _ in hosts:
            if not add_qdisc(name, device, "tbf", *rate, "burst", "128kb", "latency", "50ms"):
                raise SystemExit("tc cannot shape the link: it needs netem or tbf")
        yield "a cable in user space" if args.delay_ms else "nobody"


@contextmanager
def hosts(args: argparse.Namespace) -> Iterator[tuple[Job, str]]:
    """Make the hosts; yield a function that runs a job on them, and what makes the delay."""
    sys.path.append(str(ROOT))
    from tests.parallel.hosts import two_hosts
    from tests.parallel.jobs import environment, mpirun

    with (
        tempfile.TemporaryDirectory() as folder,
        two_hosts(Path(folder), [args.ranks_per_host] * 2) as (before, options, _),
        link(args) as delayed_by,
    ):

        def job(script: str, words: Sequence[str]) -> Any:
            exported = ["-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS"]
            # MPI does not know that both hosts have the same cores: without this, its ranks that
            # wait take them from those that work.
            polite = ["--mca", "mpi_yield_when_idle", "1"]
            with tempfile.TemporaryDirectory() as own:
                file = Path(own) / "measured.json"
                program = [sys.executable, script, *words, "--rank-file", str(file)]
                ranks = 2 * args.ranks_per_host
                command = mpirun(ranks, *options, *exported, *polite, *program)
                subprocess.run([*before, *command], env=environment(), check=True)
                return json.loads(file.read_text())

        yield job, delayed_by


def add_link_options(parser: argparse.ArgumentParser, ranks: int, delay_ms: float) -> None:
    """Add the options of `hosts`."""
    parser.add_argument("--ranks-per-host", type=int, default=ranks)
    parser.add_argument("--gbit", type=float, default=1, help="a second, each way; 0: no limit")
    parser.add_argument("--delay-ms", type=float, default=delay_ms, help="each way")
    parser.add_argument("--rank-file", type=Path, help=argparse.SUPPRESS)


def print_table(records: Sequence[Record], bound_seconds: float) -> None:
    """Print the times, and their share of the bound."""
    rows = []
    for record in records:
        seconds = Spread(**record["seconds"])
        rows.append([record["entry"], str(seconds), f"{bound_seconds / seconds.median:.0%}"])
    print(table(["", "time", "bound / time"], rows))


def main() -> None:
    parser = make_parser("Allreduce between two simulated hosts.", "hosts")
    parser.add_argument("--entries", nargs="+", choices=WAYS, default=[*WAYS], metavar="ENTRY")
    parser.add_argument("--mib", type=int, default=64, help="size of the tensor")
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each entry, in turns")
    add_link_options(parser, ranks=2, delay_ms=1)
    args = parser.parse_args()
    if args.rank_file:
        rank_main(args)
        return
    with hosts(args) as (job, delayed_by):
        ways = {
            entry: partial(job, __file__, [*sys.argv[1:], "--entries", entry])
            for entry in args.entries
        }
        records = [
            each for jobs in in_turns(ways, args.rounds).values() for each in summarize(jobs)
        ]
    delay = f"{args.delay_ms:g} ms delay each way (by {delayed_by})"
    print(f"{args.mib} MiB, {args.gbit:g} Gbit/s, {delay}, {args.ranks_per_host} ranks a host\n")
    bound_seconds = (args.mib << 20) * 8 / (args.gbit * 1e9)
    print_table(records, bound_seconds)
    line = {"gbit": args.gbit, "delay_ms": args.delay_ms, "by": delayed_by}
    write(args.json, [line | record for record in records])


if __name__ == "__main__":
    main()
