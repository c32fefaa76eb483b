"""What each rank of the SIGKILL tests runs: the last rank dies while the others wait for it.

Usage: worker_killed.py WAY [receive]; "receive" waits for a control message instead of data.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from hvdlite.common.base.errors import PeerLostError
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.base import Reduction
from hvdlite.common.transport.base import Transport
from tests.backends import Program, quiet
from tests.parallel.connecting import connect


def main(way: str, plane: str = "data") -> None:
    """Report who was missed and how long that took to see."""
    transport = connect(everyone=plane == "receive")
    victim = transport.topology.size - 1
    reduce(transport, way)
    if transport.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    missed = receive(transport) if plane == "receive" else lose(transport, way)
    seconds = time.monotonic() - start
    os.write(1, f"rank {transport.rank} misses {missed} after {seconds:.1f} s\n".encode())
    transport.close()
    os._exit(0)  # MPI_Finalize may wait for the dead


def reduce(transport: Transport, way: str) -> None:
    """One allreduce."""
    program = Program.of(transport, allreduce=way)
    array = np.ones(100_000, np.float32)
    backend = program.backend("allreduce", "float32")
    backend.allreduce(program.members, [array], [array], Reduction(ReduceOp.SUM), quiet)


def lose(transport: Transport, way: str) -> int | None:
    """Wait for data from the victim."""
    try:
        victim = transport.topology.size - 1
        if way == "shm":
            while True:  # the first token may be of the allreduce before
                transport.await_signal(victim)
        transport.wait([transport.irecv(victim, np.zeros(10, np.float32))])
    except PeerLostError as error:
        return error.rank
    return None


def receive(transport: Transport) -> int | None:
    """Wait for the end of the connection to the victim; other survivors may leave earlier."""
    victim = transport.topology.size - 1
    while messages := transport.receive(10.0):
        if any(rank == victim and body is None for rank, body in messages):
            return victim
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
