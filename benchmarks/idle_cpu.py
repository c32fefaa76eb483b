"""CPU share of every rank while nothing is enqueued, and while one waits for a slow peer.

    python benchmarks/idle_cpu.py             # 2 and 8 ranks, 10 seconds each
    python benchmarks/idle_cpu.py --hosts     # 2 + 2 ranks on two simulated hosts, over TCP and MPI

Prints, for each rank, the CPU time of the process (all threads) over the wall time, in percent. See
`simulated_hosts` for what the hosts need.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import numpy as np
from jobs import hvdlite_run
from simulated_hosts import MPI, TCP, add_link_options, describe, two_hosts

import hvdlite.numpy as hvd


def cpu_seconds() -> float:
    """User and system time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def share(seconds: float, wait: bool) -> float:
    """Percent of one core that this rank uses while it sleeps, or waits for rank 0 to come."""
    cpu, wall = cpu_seconds(), time.monotonic()
    if not wait or hvd.rank() == 0:
        time.sleep(seconds)
    if wait:
        hvd.allreduce(np.ones(1), name="late")
    return 100 * (cpu_seconds() - cpu) / (time.monotonic() - wall)


def rank_main(seconds: float) -> None:
    """Run one rank: warm up, then measure."""
    hvd.init()
    for _ in range(10):
        hvd.allreduce(np.ones(1000), name="warm")
    for label, wait in (("idle", False), ("rank 0 comes late", True)):
        hvd.barrier()
        shares = hvd.allgather(np.array([share(seconds, wait)]), name="share")
        if hvd.rank() == 0:
            print(f"{hvd.size()} ranks, {label}: " + "  ".join(f"{s:.3f} %" for s in shares))


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--hosts", action="store_true", help="two simulated hosts")
    parser.add_argument("--transports", nargs="+", choices=(TCP, MPI), default=[TCP, MPI])
    add_link_options(parser, ranks=2)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.seconds)
        return
    command = [sys.executable, __file__, "--rank", "--seconds", str(options.seconds)]
    if options.hosts:
        with two_hosts(options) as hosts:
            for transport in options.transports:
                print(f"{transport}, {describe(options, hosts.delayed_by)}:", flush=True)
                hosts.run(transport, command)
        return
    for ranks in options.ranks:
        subprocess.run([*hvdlite_run(ranks), *command], check=True)


if __name__ == "__main__":
    main()
