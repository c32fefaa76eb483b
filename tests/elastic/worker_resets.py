"""A worker of the tests that resets as often as its driver says, and prints what it holds."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import numpy as np

import hvdlite.numpy as hvd
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.runtime import lifecycle, worlds
from hvdlite.common.runtime.current import this_process
from tests.elastic.fake_driver import STOP
from tests.elastic.worker_allreduce import say


def resident_kib() -> int:
    """The memory of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def say_what_it_holds(epoch: int) -> None:
    """Print the numbers that must not grow, when the engine of the last world has finished."""
    end = time.monotonic() + 10
    while any(not old.engine.finished for old in this_process.shut_down):
        assert time.monotonic() < end
        time.sleep(0.001)
    lifecycle._forget_finished()
    say(
        epoch=epoch,
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        resident_kib=resident_kib(),
    )


def main() -> None:
    """Go from world to world, until the driver stops the job."""
    hvd.init()
    while True:
        world = worlds.current_world()
        assert world is not None
        try:
            for step in range(1_000_000):
                array = np.full(20_000, float(world.rank + 1))
                assert (hvd.allreduce(array, op=hvd.Sum, name="x") == 3).all()
                if step == 0:
                    say_what_it_holds(world.epoch)
                kind = worlds.check()
                if kind == STOP:
                    return
                if kind is not None:
                    break
        except HorovodInternalError as error:
            assert not error.job_goes_on
        worlds.next_world(world.epoch)


if __name__ == "__main__":
    main()
