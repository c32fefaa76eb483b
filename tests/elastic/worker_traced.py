"""A worker of the tests that traces its iterations in world after world."""

from __future__ import annotations

import numpy as np

import hvdlite.numpy as hvd
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.iterations.trace import trace_by_setting
from hvdlite.common.runtime import lifecycle, worlds
from tests.elastic.fake_driver import STOP
from tests.elastic.worker_allreduce import say


def main() -> None:
    """Trace blocks until the driver stops the job; those that fail make no row."""
    hvd.init()
    trace = trace_by_setting()
    assert trace is not None
    if lifecycle.is_waiting():
        worlds.next_world(0)
    kind = None
    while kind != STOP:
        world = worlds.current_world()
        assert world is not None
        iterations = 0
        try:
            kind = None
            while kind is None:
                with trace.iteration():
                    hvd.allreduce(np.zeros(1000), name="gradient")
                say(epoch=world.epoch, step=iterations)
                iterations += 1
                kind = worlds.check()
        except HorovodInternalError as error:
            assert not error.job_goes_on
        say(rank=world.rank, iterations=iterations)
        if kind != STOP:
            worlds.next_world(world.epoch)


if __name__ == "__main__":
    main()
