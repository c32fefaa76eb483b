"""A worker of the tests: it reduces arrays in world after world, and prints what it got."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

import hvdlite.numpy as hvd
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.runtime import lifecycle, worlds
from tests.elastic.fake_driver import STOP

ELEMENTS = int(os.environ.get("ELEMENTS", "1000"))
ALL_STEPS = 20  # So many steps of a world are printed, and some of the later ones.
NUMBER = int(os.environ["HVDLITE_WORKER"])


def say(**words: Any) -> None:
    """Print a line."""
    print(json.dumps({"time": time.monotonic(), **words}), flush=True)


def modules() -> set[str]:
    """Return the modules of hvdlite that are imported."""
    return {name for name in sys.modules if name.startswith("hvdlite.")}


def reduce_until_stopped() -> None:
    """Reduce in each step; each world counts its steps from 0."""
    commit = 1
    while True:
        world = worlds.current_world()
        assert world is not None
        assert (hvd.rank(), hvd.size()) == (world.rank, world.size)
        try:
            for step in range(sys.maxsize):
                array = np.full(ELEMENTS, (NUMBER + 1) * (step % 100 + 1), np.float64)
                result = hvd.allreduce(array, op=hvd.Sum, name="gradient")
                assert (result == result[0]).all()
                if step < ALL_STEPS or step % 100 == 0:
                    new = sorted(modules() - BEFORE)
                    say(epoch=world.epoch, rank=world.rank, step=step, sum=result[0], imported=new)
                kind = worlds.check()
                if kind == STOP:
                    return
                if kind is not None:
                    say(epoch=world.epoch, interrupted=step)
                    break
        except HorovodInternalError as error:
            say(epoch=world.epoch, error=str(error), at_fault=error.rank)
            assert not error.job_goes_on
        commit += 1
        worlds.next_world(commit)


if __name__ == "__main__":
    hvd.init()
    BEFORE = modules()
    if lifecycle.is_waiting():
        try:
            hvd.allreduce(np.zeros(1), name="too early")
        except HorovodInternalError as error:
            say(waiting=[hvd.rank(), hvd.size(), hvd.local_size()], error=str(error))
        worlds.next_world(0)
    reduce_until_stopped()
