"""A folder of snapshots is for one job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hvdlite.common.base.errors import HorovodInternalError
from tests.ps.cluster import Cluster, train_in_one, trainers
from tests.ps.cluster import bits as bits_of

NewCluster = Callable[..., Cluster]


def test_snapshots_of_another_job_do_not_become_first_weights(new_cluster: NewCluster) -> None:
    cluster = new_cluster(1, 1, every=1)
    (trainer,) = trainers(cluster, 1)
    trainer.train(3)
    trainer.worker.leave()
    cluster.servers[0].wait()
    cluster.scheduler.end()
    cluster.state.forget()
    cluster.start_scheduler()
    server = cluster.start_server(0)
    with pytest.raises(HorovodInternalError, match=r"server-0 has snapshots of another job"):
        trainers(cluster, 1)
    server.wait()
    assert "remove the folder" in str(server.error)


def test_a_job_goes_on_from_its_own_snapshots_when_all_of_it_was_killed(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(1, 1, every=1)
    (trainer,) = trainers(cluster, 1)
    trainer.train(3)
    trainer.worker.close()
    cluster.servers[0].end()
    cluster.scheduler.end()
    cluster.start_scheduler()
    cluster.servers[0] = cluster.start_server(0)
    (again,) = trainers(cluster, 1)
    assert again.table.clock == 3
    again.train(6)
    assert bits_of(again.values) == train_in_one(6, lambda _step: [0])
