"""Whoever waits hears of an end, whoever else does or does not take part."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.ps.clocks import ASYNC
from hvdlite.ps.messages import Message
from hvdlite.ps.registry import TableOptions
from hvdlite.ps.shard import Shard
from hvdlite.ps.worker import RemoteTable, Worker
from tests.ps.cluster import SIZES, SPECS, Cluster, in_threads, trainers, wait_until

NewCluster = Callable[..., Cluster]


def declared(worker: Worker, name: str) -> RemoteTable:
    options = TableOptions(ASYNC, None, part_bytes=800)
    return worker.declare(name, SPECS, options, lambda: [np.zeros(size) for size in SIZES])


@pytest.mark.parametrize("word", ["push", "pull"])
def test_a_request_that_another_one_displaces_fails(word: str) -> None:
    """Two threads that use one table at the same time: none of them may wait for ever."""
    shard = Shard("t", 0, 3, {}, list, lambda _message: 1)
    ends: list[Message | Exception] = []
    others: list[Message | Exception] = []
    for done in (ends.append, others.append):
        if word == "push":
            shard.push({}, [], done)
        else:
            shard.pull(done)
    assert [str(error) for error in ends] == [
        f"worker 3 has begun another {word} of the table 't' before this one was answered: let one "
        "thread at a time use an optimizer"
    ]
    assert not others


@pytest.mark.parametrize("word", ["barrier", "declare"])
def test_what_is_asked_of_a_scheduler_that_has_ended_with_the_job_fails(
    new_cluster: NewCluster, word: str
) -> None:
    cluster = new_cluster(1, 1, server_seconds=0.3)
    (trainer,) = trainers(cluster, 1)
    cluster.servers[0].end()
    wait_until(lambda: bool(trainer.worker.failure))
    cluster.scheduler.end()

    def asks() -> None:
        with pytest.raises(HorovodInternalError, match=r"server 0 .* is lost"):
            if word == "barrier":
                trainer.worker.barrier()
            else:
                declared(trainer.worker, "another")

    in_threads(asks)
