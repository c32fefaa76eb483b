"""A worker of the tests that reduces in process sets, in world after world."""

from __future__ import annotations

import os

import numpy as np

import hvdlite.numpy as hvd
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.runtime import lifecycle, worlds
from hvdlite.common.runtime.current import current
from hvdlite.common.runtime.formed_sets import form_process_set
from tests.elastic.fake_driver import STOP
from tests.elastic.worker_allreduce import NUMBER, say

NEWCOMER = bool(os.environ.get("NEWCOMER"))
INIT_SETS = {"pair": hvd.ProcessSet([0, 1]), "rest": hvd.ProcessSet([1, 2, 3])}


def use(sets: dict[str, hvd.ProcessSet], epoch: int) -> None:
    """Reduce once in every set that this rank is a member of, and say what came of it."""
    for name, process_set in sets.items():
        total = None
        if process_set.process_set_id is not None and process_set.included():
            own = np.full(5, NUMBER + 1.0)
            total = float(hvd.allreduce(own, op=hvd.Sum, process_set=process_set, name="x")[0])
        ids = process_set.process_set_id
        say(epoch=epoch, set=name, id=ids, ranks=list(process_set.ranks or ()), sum=total)


def form(epoch: int) -> hvd.ProcessSet | None:
    """Form the set of the first and the last rank, which never release it; None on the others."""
    ends = sorted({0, hvd.size() - 1})
    formed = form_process_set(ends) if hvd.rank() in ends else None
    if formed is not None:
        own = np.full(5, NUMBER + 1.0)
        total = hvd.allreduce(own, op=hvd.Sum, process_set=formed, name="formed")
        say(epoch=epoch, formed=float(total[0]))
    hvd.barrier()
    return formed


def main() -> None:
    """Use the sets in each world until the driver stops the job."""
    hvd.init(process_sets=list(INIT_SETS.values()))
    sets = dict(INIT_SETS)
    global_ranks = hvd.global_process_set.ranks
    if lifecycle.is_waiting():
        worlds.next_world(0)
    else:
        gone = hvd.add_process_set([0, 2])
        sets["late"] = hvd.add_process_set([2, 3])
        hvd.remove_process_set(gone)
        sets["alone"] = hvd.add_process_set([2])
    formed = None
    while True:
        assert formed is None or formed.process_set_id is None  # It ends with its world.
        world = worlds.current_world()
        assert world is not None
        try:
            use(sets, world.epoch)
            assert hvd.global_process_set.ranks is global_ranks
            formed = form(world.epoch)
            say(epoch=world.epoch, table=current().engine.process_sets.all())
            while True:
                hvd.allreduce(np.zeros(1), name="global")
                kind = worlds.check()
                if kind == STOP:
                    return
                if kind is not None:
                    break
        except HorovodInternalError as error:
            assert not error.job_goes_on, error
        worlds.next_world(world.epoch)


if __name__ == "__main__":
    main()
