"""Allreduce between two simulated hosts with two ranks each, and a slow link between them.

    python benchmarks/hosts.py                  # 64 MiB of float32, 1 Gbit/s, 1 ms each way

Needs root, iproute2 and the extra test: the hosts are network namespaces, made as the tests make
them, and tc shapes the link; where the kernel has no netem, `cable` delays what goes over it. All
entries run in the same processes, in turns. A host has to send every byte of the tensor once: that
is the bound, without the headers of TCP and IP (5 %).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cable import cable
from measuring import Quartiles, make_parser, spread, table, write
from mpi4py import MPI

import hvdlite.numpy as hvd

ROOT = Path(__file__).parent.parent
GRADIENT_ELEMENTS = 1 << 20  # what is compressed is compressed gradient by gradient
Turn = Callable[[np.ndarray[Any, Any]], float]  # seconds of an allreduce of this array


# -- what the ranks do


def timed(function: Callable[[], object]) -> float:
    """Seconds of the second call, on the slowest rank."""
    function()
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    function()
    return MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX)


def hvdlite_turn(way: str, array: np.ndarray[Any, Any]) -> float:
    """hvdlite with HVDLITE_ALLREDUCE=way, which is read by init."""
    os.environ["HVDLITE_ALLREDUCE"] = way
    hvd.init()
    try:
        return timed(lambda: hvd.allreduce_(array, name="data", op=hvd.Sum))
    finally:
        hvd.shutdown()


def bfloat16_turn(compress: bool, array: np.ndarray[Any, Any]) -> float:
    """hvdlite with bfloat16 on the wire: given as it, or compressed to it as optimizers do."""
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

    os.environ["HVDLITE_ALLREDUCE"] = "auto"
    hvd.init()
    try:
        if compress:
            return timed(reduce)
        return timed(lambda: hvd.grouped_allreduce_(given, name="data", op=hvd.Sum))
    finally:
        hvd.shutdown()


def mpi_turn(array: np.ndarray[Any, Any]) -> float:
    """MPI's own, blocking."""
    return timed(lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array))


def gloo_turn(array: np.ndarray[Any, Any]) -> float:
    """torch.distributed."""
    import torch
    import torch.distributed as dist
    from peers import start_gloo

    if not dist.is_initialized():
        os.environ["GLOO_SOCKET_IFNAME"] = next(n for _, n in socket.if_nameindex() if n != "lo")
        hvd.init()
        start_gloo()
        hvd.shutdown()
    tensor = torch.from_numpy(array)
    return timed(lambda: dist.all_reduce(tensor))


TURNS: dict[str, Turn] = {
    "hvdlite hierarchical": partial(hvdlite_turn, "hierarchical"),
    "hvdlite ring": partial(hvdlite_turn, "ring"),
    "hvdlite mpi": partial(hvdlite_turn, "mpi"),
    "hvdlite, bfloat16": partial(bfloat16_turn, False),
    "hvdlite, bf16 compression": partial(bfloat16_turn, True),
    "MPI_Allreduce": mpi_turn,
    "gloo": gloo_turn,
}


def rank_main(plan: argparse.Namespace) -> None:
    """What each rank does; rank 0 writes the seconds of every round to a file."""
    array = np.zeros(plan.mib << 18, np.float32)
    measured: dict[str, list[float]] = {name: [] for name in plan.entries}
    lot = random.Random(0)
    for _ in range(plan.rounds):
        for name in lot.sample(plan.entries, len(plan.entries)):
            measured[name].append(TURNS[name](array))
    if MPI.COMM_WORLD.rank == 0:
        plan.rank_file.write_text(json.dumps(measured))


# -- around them


def ip(namespace: str, *words: str) -> None:
    """Run ip in a namespace."""
    subprocess.run(["ip", "-n", namespace, *words], check=True)


def add_qdisc(namespace: str, device: str, *words: str) -> bool:
    """Shape what leaves through `device`; whether the kernel can."""
    command = ["ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, "root"]
    return not subprocess.run([*command, *words], capture_output=True, check=False).returncode


@contextmanager
def link(args: argparse.Namespace) -> Iterator[str]:
    """Shape the link between the hosts as `args` say; gives who makes the delay.

    netem does, where the kernel has it. Otherwise the link is replaced by a `cable`.
    """
    from tests.parallel.hosts import ADDRESSES, DEVICES, NAMES

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


def run(args: argparse.Namespace, script: str = __file__) -> tuple[Any, str]:
    """Make the hosts, and run the ranks of `script` on them.

    Gives what rank 0 has written to the rank file, and who makes the delay.
    """
    sys.path.append(str(ROOT))
    from tests.parallel.hosts import two_hosts
    from tests.parallel.jobs import environment, mpirun

    with (
        tempfile.TemporaryDirectory() as folder,
        two_hosts(Path(folder), [args.ranks_per_host] * 2) as (before, options),
        link(args) as delayed_by,
    ):
        file = Path(folder) / "measured.json"
        words = [sys.executable, script, *sys.argv[1:], "--rank-file", str(file)]
        exported = ["-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS"]
        # MPI does not know that both hosts have the same cores: without this, its ranks that wait
        # take them from those that work.
        polite = ["--mca", "mpi_yield_when_idle", "1"]
        command = mpirun(2 * args.ranks_per_host, *options, *exported, *polite, *words)
        subprocess.run([*before, *command], env=environment(), check=True)
        return json.loads(file.read_text()), delayed_by


def add_link_options(parser: argparse.ArgumentParser, ranks: int, delay_ms: float) -> None:
    """What `run` needs."""
    parser.add_argument("--ranks-per-host", type=int, default=ranks)
    parser.add_argument("--gbit", type=float, default=1, help="a second, each way")
    parser.add_argument("--delay-ms", type=float, default=delay_ms, help="each way")
    parser.add_argument("--rank-file", type=Path, help=argparse.SUPPRESS)


def print_table(measured: dict[str, Quartiles], bound_seconds: float) -> None:
    """Time, and share of the bound."""
    rows = [
        [name, spread(seconds), f"{bound_seconds / seconds.median:.0%}"]
        for name, seconds in measured.items()
    ]
    print(table(["", "time", "bound / time"], rows))


def main() -> None:
    parser = make_parser("Allreduce between two simulated hosts.", "hosts")
    parser.add_argument("--entries", nargs="+", choices=TURNS, default=[*TURNS], metavar="ENTRY")
    parser.add_argument("--mib", type=int, default=64, help="size of the tensor")
    parser.add_argument("--rounds", type=int, default=5)
    add_link_options(parser, ranks=2, delay_ms=1)
    args = parser.parse_args()
    if args.rank_file:
        rank_main(args)
        return
    measured, delayed_by = run(args)
    quartiles = {name: Quartiles.of(seconds) for name, seconds in measured.items()}
    delay = f"{args.delay_ms:g} ms delay each way (by {delayed_by})"
    print(f"{args.mib} MiB, {args.gbit:g} Gbit/s, {delay}, {args.ranks_per_host} ranks a host\n")
    bound_seconds = (args.mib << 20) * 8 / (args.gbit * 1e9)
    print_table(quartiles, bound_seconds)
    records = [{"entry": name, "seconds": asdict(each)} for name, each in quartiles.items()]
    line = {"gbit": args.gbit, "delay_ms": args.delay_ms, "by": delayed_by, "mib": args.mib}
    write(args.json, [line | record for record in records])


if __name__ == "__main__":
    main()
