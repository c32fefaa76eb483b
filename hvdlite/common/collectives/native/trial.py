"""Try the compiled allreduce: `python -m hvdlite.common.collectives.native.trial`.

Exits with 0 where it works; the last line of its output says where it is from, or why it does not
work. `hvdlite-run --check-build` runs it.
"""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.base import Array, Members, Reduction
from hvdlite.common.collectives.native.cache import BuildError
from hvdlite.common.collectives.native.library import Library, library
from hvdlite.common.collectives.shm import ShmBackend
from hvdlite.common.transport.inprocess import InProcessWorld

_RANKS = 2
_ELEMENTS = 1_000_000  # more than fits in the slots at once
_LIMIT_SECONDS = 60.0


def main() -> int:
    """Add arrays on two ranks, which are threads; return 0 if the sum is right."""
    try:
        loaded = library("on")
    except BuildError as error:
        print(error)
        return 1
    assert loaded is not None
    sums = reduce_in_threads(loaded)
    expected = np.arange(_ELEMENTS, dtype=np.float32) * 2 + sum(range(_RANKS))
    if len(sums) == _RANKS and all((each == expected).all() for each in sums):
        print(loaded.origin)
        return 0
    print(f"the compiled allreduce ({loaded.origin}) gives a wrong sum, or none at all")
    return 1


def reduce_in_threads(loaded: Library) -> list[Array]:
    """Return the sum on each rank that has one in time."""
    world = InProcessWorld(Topology.single_host(_RANKS))
    sums: list[Array] = []

    def reduce(rank: int) -> None:
        array = np.arange(_ELEMENTS, dtype=np.float32) + rank
        members = Members(tuple(range(_RANKS)), rank, world.topology)
        backend = ShmBackend(world.transport(rank), loaded)
        backend.allreduce(
            members, [array], [array], Reduction(ReduceOp.SUM), lambda phase: nullcontext()
        )
        sums.append(array)

    threads = [threading.Thread(target=reduce, args=(rank,), daemon=True) for rank in range(_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LIMIT_SECONDS)
    return sums


if __name__ == "__main__":
    sys.exit(main())
