"""The parts of the process group that need no other rank."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hvdlite.torch as hvd
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.requests.entries import Entry
from hvdlite.common.requests.messages import Request
from hvdlite.torch.process_group import checks, registration, rendezvous
from hvdlite.torch.process_group.arguments import as_lists, op_of, root_of, timeout_of, translate
from hvdlite.torch.process_group.tensors import overlap
from hvdlite.torch.process_group.waiting import Pool, deadlines, future_of
from hvdlite.torch.process_group.work import CollectiveWork

MINUTE = timedelta(minutes=1)


def test_a_second_registration_is_no_error() -> None:
    registration.register()
    assert "hvdlite" in dist.Backend.backend_list


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("SUM", ReduceOp.SUM),
        ("AVG", ReduceOp.AVERAGE),
        ("MAX", ReduceOp.MAX),
        ("PRODUCT", ReduceOp.PRODUCT),
        ("BXOR", ReduceOp.BXOR),
    ],
)
def test_reductions(name: str, op: ReduceOp) -> None:
    given = getattr(dist.ReduceOp, name)
    options = dist.AllreduceOptions()
    options.reduceOp = given
    assert translate(given) == translate(op_of(options)) == (op, 1.0)


def test_factors_of_sums() -> None:
    for factor in (0.5, torch.tensor(0.25)):
        options = dist.AllreduceOptions()
        options.reduceOp = dist._make_nccl_premul_sum(factor)
        assert translate(op_of(options)) == (ReduceOp.SUM, float(factor))
    with pytest.raises(ValueError, match=r"no ReduceOp\.median: use one of SUM"):
        translate("median")


def test_two_spellings_of_arguments() -> None:
    one, two = torch.ones(1), torch.ones(2)
    assert as_lists([one, two], one) == ([[one, two]], [one])
    assert as_lists([[one, two]], [one]) == ([[one, two]], [one])
    options = dist.BroadcastOptions()
    options.rootRank = 3
    assert root_of(options) == root_of(3) == 3
    assert timeout_of(options, None, MINUTE) == MINUTE  # Not set: -1 ms.
    assert timeout_of(options, 2 * MINUTE, MINUTE) == 2 * MINUTE
    options.timeout = 3 * MINUTE
    assert timeout_of(options, None, MINUTE) == 3 * MINUTE


def test_splits() -> None:
    rows = torch.ones(6, 2)
    checks.rows_of("x", rows, [1, 5], 2, "input")
    checks.rows_of("x", rows, [], 3, "input")
    for splits, ranks, text in (
        ([], 4, "6 rows for 4 ranks"),
        ([6], 2, "1 input splits for 2 ranks"),
        ([7, -1], 2, "must not be negative"),
        ([2, 3], 2, "sum to 5"),
    ):
        with pytest.raises(ValueError, match=text):
            checks.rows_of("x", rows, splits, ranks, "input")


def test_tensors_thatoverlap() -> None:
    whole = torch.zeros(8)
    assert overlap(whole[:4], whole) and overlap(whole[2:5], whole[4:])
    assert not overlap(whole[:4], whole[4:]) and not overlap(whole, whole.clone())


def test_numbers_that_are_not_those_of_hvdlite() -> None:
    rendezvous._check({"rank": "1", "world_size": "4"}, 1, 4)
    with pytest.raises(ValueError, match=r"world_size=2\), but hvdlite has world_size 4"):
        rendezvous._check({"rank": "1", "world_size": "2"}, 1, 4)


def pending(name: str = "pg.0.allreduce.1") -> Entry:
    return Entry(Request(0, name, "allreduce"))


def test_callbacks_may_wait_for_what_the_thread_that_settles_does() -> None:
    """As PowerSGD's hook does: each callback waits for the next collective."""
    works = [CollectiveWork([pending()], [], MINUTE, [0]) for _ in range(40)]
    ended = threading.Event()

    def callback(index: int, _: Any) -> None:
        if index + 1 < len(works):
            works[index + 1].wait(MINUTE)
        ended.set()

    futures = [
        work.get_future().then(lambda done, index=index: callback(index, done))
        for index, work in enumerate(works)
    ]
    for work in works:  # The "engine" completes all, one after the other.
        work.entries[0].handle.complete()
    for future in futures:
        future.wait()
    assert ended.is_set()


def test_an_error_is_one_of_the_future_itself() -> None:
    work = CollectiveWork([pending()], [], MINUTE, [0])
    future = work.get_future()
    work.entries[0].handle.fail(hvd.HorovodInternalError("rank 3 is lost", 3))
    with pytest.raises(RuntimeError, match="rank 3 is lost"):
        future.wait()
    with pytest.raises(hvd.HorovodInternalError) as error:
        work.wait()
    assert error.value.rank == 3


def test_a_future_has_the_timeout_of_its_work() -> None:
    """DDP waits for futures alone."""
    work = CollectiveWork([pending()], [], timedelta(seconds=0.05), [0, 1])
    ended = threading.Event()
    future = work.get_future()
    future.add_done_callback(lambda _: ended.set())
    assert ended.wait(10)
    with pytest.raises(RuntimeError, match=r"'pg.0.allreduce.1' was not complete after 0.05 s"):
        future.wait()
    work.entries[0].handle.complete()  # The collective has gone on.
    assert work.wait() and work.get_future().wait() == []


def test_deadlines_are_forgotten_when_the_work_has_ended() -> None:
    """Most are 30 minutes away, and a step of training makes many."""
    before = len(deadlines._jobs)
    for limit in (MINUTE, timedelta.max):
        work = CollectiveWork([pending()], [], limit, [0])
        future = work.get_future()
        assert len(deadlines._jobs) == before + 1
        work.entries[0].handle.complete()
        assert future.wait() == [] and len(deadlines._jobs) == before


def test_a_work_is_finished_once_by_whoever_waits_first() -> None:
    finished: list[int] = []
    output = torch.ones(1)
    work = CollectiveWork([pending()], [output], MINUTE, [0], lambda: finished.append(1))
    threads = [threading.Thread(target=work.wait) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert not work.is_completed() and not finished
    work.entries[0].handle.complete()
    for thread in threads:
        thread.join(30)
    assert work.is_success() and finished == [1] and work.result() == [output]


def test_a_pool_uses_its_threads_again() -> None:
    pool = Pool("test-futures")
    before = threading.active_count()
    for _ in range(200):
        done = threading.Event()
        pool.run(done.set)
        assert done.wait(30)
    assert threading.active_count() - before <= 3


def test_a_future_that_has_ended_already() -> None:
    future = future_of(lambda: [1], lambda job: job())
    assert future.wait() == [1]
