"""What a parameter server costs, beside allreduce, and where it is the better choice.

    python benchmarks/parameter_server.py                # a minute; --only step tiny ... for parts
    python benchmarks/parameter_server.py --quick

Needs the extras ps, torch and test (for the part "hosts": root, iproute2 and tc, else it is left
out). Every part starts clusters of processes on this machine:

- step: a step of 97.5 MiB (ResNet-50, SGD) with 2 workers and 1 server, in sync: through shared
  memory, ipc:// and tcp://, in turns, beside allreduce by hvdlite among 2 ranks.
- tiny: a step of 1,000 parameters of 16 elements.
- slow: 4 workers, one of which takes 20 ms longer for each step: steps per second of all of them
  in sync, ssp and async.
- balance: the largest load over the mean, on 2, 3, 4 and 8 servers; and the layout of 10^5 parts.
- snapshot: for how long a snapshot of 97.5 MiB keeps a server from the next update.
- recovery: how much longer the step takes in which a server is killed and starts again.
- hosts: 4 workers and 4 servers on 8 simulated hosts, beside what the links allow.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from jobs import environment, hvdlite_run, in_turns, run_command
from measuring import Spread, duration, make_parser, parse, say, table, write
from resnet50 import SIZES

from hvdlite.ps.layout import place

HERE = Path(__file__).parent
MEMBER = HERE / "ps_member.py"
PARTS = ("step", "tiny", "slow", "balance", "snapshot", "recovery", "hosts")
COMPUTE_SECONDS, SLOW_SECONDS = 0.005, 0.02  # Of a step, and more of the slow worker's.
WARM_STEPS = 3
JOB_SECONDS = 60
Rows = list[tuple[str, str]]


@dataclass
class Job:
    """A cluster, and what its workers do."""

    servers: int = 1
    workers: int = 2
    sizes: str = "resnet50"
    mode: str = "sync"
    staleness: int | None = None
    steps: int = 15
    seconds: float = 0.0  # Of modes in which workers do not wait; 0: all steps.
    slow: float = 0.0
    compute: float = 0.0
    way: str = "memory"
    wide: bool = True  # The server's optimizer uses all cores.
    variables: Mapping[str, str] = field(default_factory=dict)
    prefixes: Sequence[Sequence[str]] = ()  # Of the commands: scheduler, servers, workers.
    address: str = "127.0.0.1"


class Cluster:
    """The processes of a job."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job, self.folder = job, folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._environ = environment() | {
            "HVDLITE_SCHEDULER": f"{job.address}:{port}", "HVDLITE_NUM_SERVERS": str(job.servers),
            "HVDLITE_NUM_WORKERS": str(job.workers), **job.variables,
        }  # fmt: skip
        kept = ("sizes", "mode", "staleness", "steps", "seconds", "slow", "compute", "way", "wide")
        words = {"folder": str(folder), **{name: getattr(job, name) for name in kept}}
        self._command = [sys.executable, str(MEMBER), json.dumps(words)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str, number: int) -> None:
        """Start a process, or start it again."""
        place = {"scheduler": 0, "server": 1, "worker": 1 + self._job.servers}[role] + number
        prefix = self._job.prefixes[place] if self._job.prefixes else ()
        environ = {**self._environ, "HVDLITE_ROLE": role, "HVDLITE_NODE_ID": f"{role}{number}"}
        command = [*prefix, *self._command]
        self.processes[f"{role}{number}"] = subprocess.Popen(command, env=environ)

    def wait(self) -> list[list[list[float]]]:
        """Return the times of all workers' steps when all processes have ended."""
        for name, process in self.processes.items():
            if code := process.wait(JOB_SECONDS):
                raise SystemExit(f"{name} ended with {code}")
        files = [self.folder / f"worker{number}.json" for number in range(self._job.workers)]
        return [json.loads(file.read_text()) for file in files]


@contextmanager
def running(job: Job, folder: Path) -> Iterator[Cluster]:
    """Start all processes of a job; none is left at the end."""
    cluster = Cluster(job, folder)
    try:
        for role, count in (("scheduler", 1), ("server", job.servers), ("worker", job.workers)):
            for number in range(count):
                cluster.start(role, number)
        yield cluster
    finally:
        for process in cluster.processes.values():
            process.kill()
            process.wait()


def times_of(job: Job) -> list[list[list[float]]]:
    """Run a job; return when the steps of each worker began and ended."""
    with tempfile.TemporaryDirectory() as folder, running(job, Path(folder)) as cluster:
        return cluster.wait()


def step_seconds(job: Job) -> list[float]:
    """Run a job in sync; return the seconds of each step on the slowest worker."""
    steps = zip(*times_of(job), strict=True)
    return [max(end - begin for begin, end in step) for step in steps][WARM_STEPS:]


def spread_of(seconds: Sequence[float]) -> str:
    """Return the median, and the quartiles in brackets."""
    found = Spread.quartiles(seconds)
    return f"{duration(found.median)} ({duration(found.low)} to {duration(found.high)})"


# -- the parts


def measure_step(args: argparse.Namespace) -> Rows:
    """See the top of the module."""
    ways: dict[str, Callable[[], list[float]]] = {
        "server, shared memory": lambda: step_seconds(Job(steps=args.steps)),
        "server, ipc://": lambda: step_seconds(Job(steps=args.steps, way="ipc")),
        "server, tcp://": lambda: step_seconds(Job(steps=args.steps, way="tcp")),
        "allreduce": lambda: allreduce_seconds(args.steps),
    }
    found = in_turns(ways, args.rounds)
    return [
        (f"a step of 97.5 MiB, {name}", spread_of([each for job in jobs for each in job]))
        for name, jobs in found.items()
    ]


def allreduce_seconds(steps: int) -> list[float]:
    """Return the seconds of the steps of hvdlite's own DistributedOptimizer with 2 ranks."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.json"
        words = [str(Path(__file__)), "--allreduce", str(file), "--steps", str(steps)]
        run_command([*hvdlite_run(2), sys.executable, *words], folder)
        found: list[float] = json.loads(file.read_text())
    return found[WARM_STEPS:]


def train_by_allreduce(args: argparse.Namespace) -> None:
    """Be a rank of `allreduce_seconds`."""
    import torch

    import hvdlite.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.01), [(str(n), p) for n, p in enumerate(parameters)]
    )
    seconds = []
    for _ in range(args.steps):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        hvd.barrier()
        begin = time.perf_counter()
        optimizer.step()
        seconds.append(hvd.allgather_object(time.perf_counter() - begin))
    if hvd.rank() == 0:
        args.allreduce.write_text(json.dumps([max(each) for each in seconds]))
    hvd.shutdown()


def measure_tiny(args: argparse.Namespace) -> Rows:
    """See the top of the module."""
    seconds = step_seconds(Job(sizes="1000x16", steps=10 * args.steps, wide=False))
    return [("a step of 1,000 parameters of 16 elements", spread_of(seconds))]


def measure_slow(args: argparse.Namespace) -> Rows:
    """See the top of the module."""
    rates = {}
    for mode, staleness in (("sync", None), ("ssp", 4), ("async", None)):
        job = Job(
            workers=4, sizes="20x5000", mode=mode, staleness=staleness, slow=SLOW_SECONDS,
            compute=COMPUTE_SECONDS, wide=False, seconds=args.seconds,
            steps=max(20, round(args.seconds / SLOW_SECONDS)) if mode == "sync" else 1_000_000,
        )  # fmt: skip
        workers = times_of(job)
        # All have begun together, and the first one to end ends the measurement for all.
        begin = min(each[0][0] for each in workers)
        end = min(each[-1][1] for each in workers)
        count = sum(1 for each in workers for _, stop in each if stop <= end)
        rates[f"{mode}{'' if staleness is None else f'({staleness})'}"] = count / (end - begin)
    return [
        (f"one slow worker of 4, {name}", f"{rate:.0f} steps/s ({rate / rates['sync']:.2f})")
        for name, rate in rates.items()
    ]


def measure_balance(_args: argparse.Namespace) -> Rows:
    """See the top of the module."""
    loads = []
    for servers in (2, 3, 4, 8):
        found = place(SIZES, [4] * len(SIZES), servers).loads()
        loads.append(f"{max(found) * servers / sum(found):.4f}")
    begin = time.perf_counter()
    parts = len(place([1000] * 100_000, [4] * 100_000, 8).parts)
    took = time.perf_counter() - begin
    return [
        ("largest load over the mean, ResNet-50 on 2, 3, 4, 8 servers", ", ".join(loads)),
        (f"layout of {parts:,} parts", duration(took)),
    ]


def measure_snapshot(args: argparse.Namespace) -> Rows:
    """See the top of the module."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {"HVDLITE_PS_SNAPSHOT": folder, "HVDLITE_PS_SNAPSHOT_EVERY": "5"}
        with running(Job(steps=2 * args.steps, variables=variables), Path(folder)) as cluster:
            cluster.wait()
        files = Path(folder).glob("server0.*.json")
        seconds = [each for file in files for each in json.loads(file.read_text())]
    return [("a snapshot of 97.5 MiB keeps the server for", spread_of(seconds))]


def measure_recovery(args: argparse.Namespace) -> Rows:
    """See the top of the module."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {"HVDLITE_PS_SNAPSHOT": folder, "HVDLITE_PS_SNAPSHOT_EVERY": "1"}
        job = Job(
            servers=2, sizes="20x5000", steps=250, compute=0.01, variables=variables, wide=False
        )
        with running(job, Path(folder)) as cluster:
            while not list(Path(folder).glob("server-0/*/*")):
                time.sleep(0.01)
            time.sleep(0.5)
            killed = cluster.processes["server0"]
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            cluster.start("server", 0)
            steps = cluster.wait()[0]
        load = load_seconds()
    longest = max(end - start for start, end in steps)
    return [
        ("the step in which a server was killed took", duration(longest)),
        ("of which Python needs to import hvdlite and PyTorch", duration(load)),
    ]


def load_seconds() -> float:
    """Return how long a server needs until it runs the script at all."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, hvdlite.torch.ps"], check=True)
    return time.perf_counter() - begin


def measure_hosts(args: argparse.Namespace) -> Rows:
    """See the top of the module."""
    elements = args.mebibytes * (1 << 20) // 4 // 64
    with bridged_hosts(8, args.mbit) as hosts:
        if hosts is None:
            return [("4 + 4 simulated hosts", "left out: needs root, iproute2, bridges and tbf")]
        prefixes = [["ip", "netns", "exec", name] for name, _ in (hosts[0], *hosts)]
        job = Job(
            servers=4, workers=4, sizes=f"64x{elements}", steps=WARM_STEPS + 3,
            prefixes=prefixes, address=hosts[0][1], wide=False,
        )  # fmt: skip
        seconds = step_seconds(job)
    link = args.mebibytes * (1 << 20) * 8 / (args.mbit * 1e6)
    times = f"{median(seconds) / link:.2f} x M/B"
    return [
        (f"4 workers, 4 servers, {args.mbit:g} Mbit/s, {args.mebibytes} MiB", spread_of(seconds)),
        ("the same, of the time of the bytes on a link (ring of 4: 1.5)", times),
    ]


@contextmanager
def bridged_hosts(count: int, mbit: float) -> Iterator[list[tuple[str, str]] | None]:
    """Yield names and addresses of namespaces on a bridge, with limited links; None: no rights."""
    unique = os.getpid() % 100_000
    hub = f"hvdlite{unique}hub"
    with ExitStack() as stack:

        def ip(*words: str, tool: str = "ip") -> bool:
            command = [tool, *words]
            return not subprocess.run(command, capture_output=True, check=False).returncode

        def namespace(name: str) -> bool:
            stack.callback(ip, "netns", "del", name)
            return ip("netns", "add", name)

        if os.geteuid() or not namespace(hub) or not ip(
            "-n", hub, "link", "add", "br0", "type", "bridge"
        ) or not ip("-n", hub, "link", "set", "br0", "up"):  # fmt: skip
            yield None
            return
        hosts = []
        for number in range(1, count + 1):
            name, address = f"hvdlite{unique}n{number}", f"10.213.79.{number}"
            limit = ("tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "200ms")
            done = (
                namespace(name)
                and ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name",
                       f"p{number}", "netns", hub)
                and ip("-n", hub, "link", "set", f"p{number}", "master", "br0", "up")
                and ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
                and all(ip("-n", name, "link", "set", each, "up") for each in ("lo", "eth0"))
                and ip("-n", name, "qdisc", "add", "dev", "eth0", "root", *limit, tool="tc")
                and ip("-n", hub, "qdisc", "add", "dev", f"p{number}", "root", *limit, tool="tc")
            )  # fmt: skip
            if not done:
                yield None
                return
            hosts.append((name, address))
        yield hosts


def main() -> None:
    """Measure the parts that are asked for, print a table and write all figures."""
    parser = make_parser(__doc__ or "", "parameter_server")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--steps", type=int, default=15, help="of a job")
    parser.add_argument("--rounds", type=int, default=2, help="jobs of each way, in turns")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each mode in `slow`")
    parser.add_argument("--mbit", type=float, default=1000.0, help="of each link in `hosts`")
    parser.add_argument("--mebibytes", type=int, default=64, help="that a step sends in `hosts`")
    parser.add_argument("--allreduce", type=Path, help=argparse.SUPPRESS)
    args = parse(parser, "fewer steps", steps=6, rounds=1, seconds=0.5, mebibytes=8)
    if args.allreduce is not None:
        train_by_allreduce(args)
        return
    measures = {part: globals()[f"measure_{part}"] for part in PARTS}
    rows: Rows = []
    records: list[dict[str, Any]] = []
    for part in args.only:
        say(part)
        found = measures[part](args)
        rows += found
        for what, figure in found:
            say(f"  {what}: {figure}")
        records += [{"part": part, "what": what, "figure": figure} for what, figure in found]
    print(table(("", "median (quartiles)"), rows))
    write(args.json, records)


if __name__ == "__main__":
    main()
