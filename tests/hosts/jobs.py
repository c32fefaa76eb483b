"""Runs hvdlite-run in a simulated host."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from tests.hosts.lab import SHARED, Lab, Running

LAUNCHER = (sys.executable, "-m", "hvdlite.launcher")
ALL = "nodea:1,nodeb:1,nodec:1"
# One short sum over all ranks, by hvdlite on numpy.
# Large enough to go between any two hosts, and not in messages by way of rank 0.
SUM = """
import hvdlite.numpy as hvd, numpy as np, os, socket, sys, time
hvd.init()
total = hvd.allreduce(np.full(4000, hvd.rank() + 1.0), op=hvd.Sum, name="x")
print("sum", hvd.rank(), socket.gethostname(), *total[:4].tolist(), flush=True)
"""
FOREVER = f"""{SUM}
print("up", flush=True)
while True:
    hvd.allreduce(np.ones(4000), name="x"); time.sleep(0.01)
"""


def hvdlite_run(
    lab: Lab, *words: str, host: str = "nodea", timeout: float = 60, cwd: str = str(SHARED),
    **variables: str,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run hvdlite-run in a host to its end."""
    return lab.run(host, *LAUNCHER, *words, timeout=timeout, cwd=cwd, **variables)


@contextlib.contextmanager
def in_the_middle(
    lab: Lab, *words: str, ranks: int = 3, host: str = "nodea", **variables: str
) -> Iterator[Running]:
    """Start hvdlite-run in a host, and wait until as many ranks have said that they are in it."""
    with lab.start(host, *LAUNCHER, *words, **variables) as running:
        out = running.process.stdout
        assert out is not None
        seen: list[str] = []
        while sum(line.endswith("up\n") for line in seen) < ranks:
            line = out.readline()
            assert line, (seen, running.finish(10))
            seen.append(line)
        yield running


def sums(done: subprocess.CompletedProcess[str]) -> dict[int, float]:
    """Return what each rank has printed as its sum."""
    words = [line.partition(":sum ")[2].split() for line in done.stdout.splitlines()]
    return {int(each[0]): float(each[2]) for each in words if each}


def sentences(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what hvdlite-run itself has said."""
    prefix = "hvdlite-run: "
    lines = done.stderr.splitlines()
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
