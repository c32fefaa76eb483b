"""The part "hosts" of `parameter_server.py`: workers and servers on 8 simulated hosts."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median

from ps_cluster import WARM_STEPS, Job, Rows, spread_of, step_seconds


def measure_hosts(args: argparse.Namespace) -> Rows:
    """See the top of `parameter_server.py`."""
    elements = args.mebibytes * (1 << 20) // 4 // 64
    with bridged_hosts(8, args.mbit) as hosts:
        if hosts is None:
            return [("4 + 4 simulated hosts", "left out: needs root, iproute2, bridges and tbf")]
        prefixes = [["ip", "netns", "exec", name] for name, _ in (hosts[0], *hosts)]
        link = args.mebibytes * (1 << 20) * 8 / (args.mbit * 1e6)
        rows = []
        for backward, what in ((0.0, ""), (2 * link, ", pushed during backward")):
            job = Job(
                servers=4, workers=4, sizes=f"64x{elements}", steps=WARM_STEPS + 3,
                backward=backward, prefixes=prefixes, address=hosts[0][1], wide=False,
            )  # fmt: skip
            seconds = step_seconds(job)
            job_words = f"4 workers, 4 servers, {args.mbit:g} Mbit/s, {args.mebibytes} MiB{what}"
            times = f"{median(seconds) / link:.2f} x M/B"
            rows += [
                (job_words, spread_of(seconds)),
                ("the same, of the time of the bytes on a link (ring of 4: 1.5)", times),
            ]
    return rows


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
