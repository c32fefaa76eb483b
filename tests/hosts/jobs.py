"""Runs hvdlite-run in a simulated host."""

from __future__ import annotations

import subprocess
import sys

from tests.hosts.lab import SHARED, Lab

LAUNCHER = (sys.executable, "-m", "hvdlite.launcher")
ALL = "nodea:1,nodeb:1,nodec:1"
# One short sum over all ranks, by hvdlite on numpy.
SUM = """
import hvdlite.numpy as hvd, numpy as np, os, socket, sys, time
hvd.init()
total = hvd.allreduce(np.full(4, hvd.rank() + 1.0), op=hvd.Sum, name="x")
print("sum", hvd.rank(), socket.gethostname(), *total.tolist(), flush=True)
"""


def hvdlite_run(
    lab: Lab, *words: str, host: str = "nodea", timeout: float = 60, cwd: str = str(SHARED),
    **variables: str,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run hvdlite-run in a host to its end."""
    return lab.run(host, *LAUNCHER, *words, timeout=timeout, cwd=cwd, **variables)


def sentences(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what hvdlite-run itself has said."""
    prefix = "hvdlite-run: "
    lines = done.stderr.splitlines()
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
