"""Two hosts on this machine, the link between them, and the jobs that run on them.

They need root, iproute2 and the extra test: the hosts are network namespaces, made as the tests
make them, and tc shapes the link; where the kernel has no netem, a `switch` delays packets.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs import run_command
from switch import switch

if TYPE_CHECKING:
    from tests.parallel.hosts import Hosts

ROOT = Path(__file__).parent.parent
TCP, MPI = "tcp", "mpi"
# MPI does not know that both hosts have the same cores: without this, its ranks that wait take
# them from those that work.
POLITE = ("--mca", "mpi_yield_when_idle", "1")


@dataclass(frozen=True)
class TwoHosts:
    """The hosts, on which jobs are started."""

    hosts: Hosts
    ranks_per_host: int
    delayed_by: str  # What delays packets between the hosts, in words.

    @property
    def ranks(self) -> int:
        """Of a job."""
        return 2 * self.ranks_per_host

    def run(self, transport: str, command: Sequence[str], **variables: str) -> None:
        """Run `command` on all ranks, connected by `transport`, with further `variables`.

        Ranks that talk TCP are started as they are, and meet at rank 0; mpirun starts the others.
        Raises what `run_command` raises; no rank is left behind.
        """
        from tests.parallel.jobs import environment, mpirun

        variables = {"HVDLITE_TRANSPORT": transport, "OMP_NUM_THREADS": "1", **variables}
        program = ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
        if transport == MPI:
            options = [*self.hosts.options, "-x", "PYTHONPATH", *POLITE]
            job = [*self.hosts.before, *mpirun(self.ranks, *options, *program)]
        else:
            words = ["-m", "tests.parallel.start_ranks", "--hosts", self.hosts.spelled]
            job = [sys.executable, *words, str(self.ranks), *program]
        run_command(job, str(ROOT), environment())

    def measure(self, transport: str, script: str, words: Sequence[str], **variables: str) -> Any:
        """Run `script` as `run` does; return the JSON that its rank 0 writes to --rank-file."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "measured.json"
            command = [sys.executable, script, *words, "--rank-file", str(file)]
            self.run(transport, command, **variables)
            return json.loads(file.read_text())


@contextmanager
def two_hosts(args: argparse.Namespace) -> Iterator[TwoHosts]:
    """Make the hosts, as the options of `add_link_options` describe them."""
    sys.path.append(str(ROOT))
    from tests.parallel import hosts

    with (
        tempfile.TemporaryDirectory() as folder,
        hosts.two_hosts(Path(folder), [args.ranks_per_host] * 2) as made,
        link(args) as delayed_by,
    ):
        yield TwoHosts(made, args.ranks_per_host, delayed_by)


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

    netem does, where the kernel has it. Otherwise the link is replaced by a `switch`.
    """
    from tests.parallel.hosts import ADDRESSES, DEVICES, NAMES

    if not (args.gbit or args.delay_ms):
        yield "nobody"
        return
    rate = ("rate", f"{args.gbit}gbit") if args.gbit else ()
    netem = ("netem", "delay", f"{args.delay_ms}ms", *rate, "limit", "10000")
    hosts = list(zip(NAMES, DEVICES, ADDRESSES, strict=True))
    if all(add_qdisc(name, device, *netem) for name, device, _ in hosts):
        yield "netem"
        return
    with ExitStack() as stack:
        if args.delay_ms:
            ip(NAMES[0], "link", "del", DEVICES[0])
            stack.enter_context(switch(DEVICES, args.delay_ms / 1000))
            for name, device, address in hosts:
                subprocess.run(["ip", "link", "set", device, "netns", name], check=True)
                ip(name, "address", "add", f"{address}/24", "dev", device)
                ip(name, "link", "set", device, "up")
        tbf = ("tbf", *rate, "burst", "128kb", "latency", "50ms")
        for name, device, _ in hosts:
            if rate and not add_qdisc(name, device, *tbf):
                raise SystemExit("tc cannot shape the link: it needs netem or tbf")
        yield "a switch in user space" if args.delay_ms else "nobody"


def add_link_options(
    parser: argparse.ArgumentParser, ranks: int = 1, gbit: float = 0, delay_ms: float = 0
) -> None:
    """Add the options of `two_hosts`, with these defaults, and --rank-file."""
    parser.add_argument("--ranks-per-host", type=int, default=ranks)
    parser.add_argument("--gbit", type=float, default=gbit, help="a second, each way; 0: no limit")
    parser.add_argument("--delay-ms", type=float, default=delay_ms, help="each way")
    parser.add_argument("--rank-file", type=Path, help=argparse.SUPPRESS)  # of a job's ranks


def describe(args: argparse.Namespace, delayed_by: str) -> str:
    """Return the link and the number of ranks in words."""
    parts = [f"{args.gbit:g} Gbit/s" if args.gbit else "no limit of the link"]
    if args.delay_ms:
        parts.append(f"{args.delay_ms:g} ms each way (by {delayed_by})")
    parts.append(f"{args.ranks_per_host} rank{'s' * (args.ranks_per_host > 1)} a host")
    return ", ".join(parts)
