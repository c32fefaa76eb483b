"""A worker of the tests: rank 0 of the first world joins, the others reduce without names."""

from __future__ import annotations

import numpy as np

import hvdlite.numpy as hvd
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.runtime import worlds
from tests.elastic.fake_driver import STOP
from tests.elastic.worker_allreduce import NUMBER, say


def main() -> None:
    """Join or reduce until a rank is lost; then reduce until the driver stops the job."""
    hvd.init()
    try:
        if hvd.rank() == 0:
            say(joins=1)
            hvd.join()
        for step in range(1_000_000):
            hvd.allreduce(np.ones(1))
            say(epoch=1, step=step)
    except HorovodInternalError as error:
        assert not error.job_goes_on
        say(error=str(error))
    while True:
        world = worlds.next_world(1)
        assert world is not None
        kind, step = None, 0
        while kind is None:
            total = hvd.allreduce(np.full(1, NUMBER + 1.0), op=hvd.Sum)[0]
            say(epoch=world.epoch, rank=world.rank, step=0, sum=total)
            kind, step = worlds.check(), step + 1
        if kind == STOP:
            return


if __name__ == "__main__":
    main()
