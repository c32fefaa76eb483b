"""Workers that begin with different values: all servers take those of one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.ps.connections.messages import Message
from hvdlite.ps.layouts.blocks import Array
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.clocks import ASYNC, SYNC
from hvdlite.ps.worker.worker import Worker
from tests.ps.cluster import SIZES, SPECS, Cluster, in_threads

NewCluster = Callable[..., Cluster]


def workers_of(cluster: Cluster, count: int) -> list[Worker]:
    return in_threads(*[lambda n=n: cluster.worker(f"worker {n}", n) for n in range(count)])


def pulled(worker: Worker, name: str, mode: str) -> set[float]:
    """Declare a table whose elements are this worker's number; return what it begins with."""
    values: list[Array] = [np.full(size, float(worker.number)) for size in SIZES]
    table = worker.declare(name, SPECS, TableOptions(mode, None, part_bytes=800), lambda: values)
    found = [np.empty(size) for size in SIZES]
    table.pull(found)
    return set(np.concatenate(found))


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_workers_that_come_at_once_give_the_servers_no_mix(
    new_cluster: NewCluster, mode: str
) -> None:
    workers = workers_of(new_cluster(2, 3), 3)
    for name in map(str, range(20)):
        begun = in_threads(*[partial(pulled, worker, name, mode) for worker in workers])
        assert len(begun[0]) == 1
        assert begun == [begun[0]] * 3, "servers have begun with values of different workers"


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
@pytest.mark.parametrize("reached", [0, 1])
def test_another_takes_the_place_of_a_first_worker_that_is_lost(
    new_cluster: NewCluster, mode: str, reached: int
) -> None:
    """One of two servers may have its values, which no other worker has."""
    cluster = new_cluster(2, 3, worker_seconds=0.3)
    first, *others = workers_of(cluster, 3)
    cut_off = threading.Event()

    def lose(message: Message) -> int:
        if message.kind == "start":
            cut_off.set()
        return 0

    def begin() -> None:
        with pytest.raises(HorovodInternalError, match="its connections are closed"):
            pulled(first, "t", mode)

    for link in [*first._servers.values()][reached:]:
        link.send = lose  # type: ignore[method-assign]

    def goes_on(worker: Worker) -> set[float]:
        assert cut_off.wait(20)  # The first one has declared the table before.
        return pulled(worker, "t", mode)

    def is_lost() -> None:
        assert cut_off.wait(20)
        first.close()

    begun = in_threads(begin, is_lost, *[partial(goes_on, worker) for worker in others])
    assert begun == [None, None, {1.0}, {1.0}]
