"""What the ranks of the tests with Slurm run, and how its output is read.

Run as a program, it is one rank: python -m tests.hosts.slurm.programs NAME
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from typing import NamedTuple

VICTIM = 3  # a rank on the second node in all jobs of four


class Place(NamedTuple):
    """Where a rank found itself, and the sum of 1 + rank over the ranks that it found."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: str
    total: int
    mpi: bool  # mpi4py was imported


def places(output: str) -> list[Place]:
    """Return what the ranks have printed, in the order of host and rank."""
    # srun puts what its tasks print together without regard to lines.
    found = re.findall(r"PLACE((?: \d+){6} \S+ \d+ (?:True|False))", output)
    words = [line.split() for line in found]
    return sorted(
        Place(*map(int, each[:6]), each[6], int(each[7]), each[8] == "True") for each in words
    )  # fmt: skip


def expected(*hosts: tuple[str, int], mpi: bool = False) -> list[Place]:
    """Return the places of one job that fills `hosts`, names and numbers of ranks, in order."""
    size = sum(count for _, count in hosts)
    result: list[Place] = []
    for at, (name, count) in enumerate(hosts):
        for local in range(count):
            across = [number for number, (_, other) in enumerate(hosts) if other > local]
            result.append(Place(len(result), size, local, count, across.index(at), len(across),
                                name, size * (size + 1) // 2, mpi))  # fmt: skip
    return result


def place() -> None:
    import numpy as np

    import hvdlite.numpy as hvd

    hvd.init()
    total = int(hvd.allreduce(np.ones(1000) * (1 + hvd.rank()), op=hvd.Sum)[999])
    numbers = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(),
               hvd.cross_size())  # fmt: skip
    words = ("PLACE", *numbers, socket.gethostname(), total, "mpi4py" in sys.modules)
    # Written at once, so that the lines of ranks that share a pipe do not mix.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())
    hvd.shutdown()


def end(rank: int, how: str) -> None:
    """One rank ends badly after the first collective; the others go on as long as they can."""
    import numpy as np

    import hvdlite.numpy as hvd

    hvd.init()
    hvd.allreduce(np.ones(3))
    print(f"rank {hvd.rank()} runs", flush=True)
    if hvd.rank() == rank and how != "run":
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise ValueError("the batch is empty")
        sys.exit(7)
    while True:
        hvd.allreduce(np.ones(3), name="step")
        time.sleep(0.01)


if __name__ == "__main__":
    if sys.argv[1] == "place":
        place()
    else:
        end(VICTIM, sys.argv[1])
