"""Ranks that leave: every collective, at every moment, in every way to leave."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.api.process_group_calls import reduce
from hvdlite.common.collectives.table import SPECS
from hvdlite.common.requests.handles import Handle
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from tests.common.watching import watching
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)

SIZE = 4
TWO_HOSTS = [[0], [1, 2, 3]]
LEAVERS: dict[str, tuple[int, list[list[int]] | None]] = {
    "a rank": (3, None),
    "the coordinator": (0, None),
    "the coordinator of two hosts": (0, TWO_HOSTS),
    "a leader": (1, TWO_HOSTS),
    "a rank below a leader": (2, TWO_HOSTS),
}
# What the ranks that stay call, by collective. Each needs the rank that leaves.
CALLS: dict[str, Callable[[], Any]] = {
    "allreduce": lambda: hvd.allreduce(np.ones(2), name="t"),
    "reducescatter": lambda: hvd.reducescatter(np.ones(8), name="t"),
    "allgather": lambda: hvd.allgather(np.ones(2), name="t"),
    "broadcast": lambda: hvd.broadcast(np.ones(2), 0, name="t"),
    "reduce": lambda: reduce(np.ones(2), 1, name="t"),
    "alltoall": lambda: hvd.alltoall(np.ones(4), name="t"),
    "barrier": hvd.barrier,
    "join": hvd.join,
    "add_process_set": lambda: hvd.add_process_set([1, 3]),
    "remove_process_set": lambda: hvd.remove_process_set(current().known_sets[1]),
    "grouped allreduce": lambda: hvd.grouped_allreduce([np.ones(2), np.ones(3)], name="t"),
}
MOMENTS = ("before", "while all wait", "after one has joined")
# `init` is called by all ranks or fails; sets of communicators take the same way as other sets.
# What two ranks, or the members of a set, do alone is in test_point_to_point, test_sender_searches
# and test_formed_sets.
NOT_CALLED = {
    "init", "split_process_set", "unsplit_process_set", "form_process_set", "release_process_set",
    "point_to_point", "find_sender",
}  # fmt: skip


def test_every_collective_is_tried() -> None:
    assert set(CALLS) - {"grouped allreduce"} == set(SPECS) - NOT_CALLED


def leave(how: str) -> None:
    """Leave the job, as by shutdown(), or as the kernel does when a process dies."""
    if how == "shutdown":
        current().shutdown()
    else:
        current().transport.close()


def wait_until_asleep(waiting: threading.Semaphore, count: int) -> None:
    """Sleep until `count` ranks wait for the end of a collective."""
    for _ in range(count):
        assert waiting.acquire(timeout=10)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Counts the calls that have begun to wait."""
    semaphore = threading.Semaphore(0)
    wait = Handle.wait

    def counted(handle: Handle) -> Any:
        if not handle.poll():
            semaphore.release()
        return wait(handle)

    monkeypatch.setattr(Handle, "wait", counted)
    return semaphore


@pytest.mark.parametrize(
    ("collective", "who", "moment", "how"),
    [  # Two of seven: any two of the four values come together in one of them.
        pytest.param(*case, marks=[] if number % 7 < 2 else [pytest.mark.soak])
        for number, case in enumerate(product(CALLS, LEAVERS, MOMENTS, ("shutdown", "death")))
    ],
)
def test_who_waits_for_a_rank_that_leaves_is_told_which(
    collective: str, who: str, moment: str, how: str, waiting: threading.Semaphore
) -> None:
    leaver, hosts = LEAVERS[who]
    left, ready = threading.Event(), threading.Barrier(SIZE)
    words = f"rank {leaver} (has been shut down|is gone)|connection to rank {leaver} was lost"

    def main(rank: int) -> None:
        hvd.add_process_set([leaver, (leaver + 1) % SIZE])
        hvd.barrier()
        ready.wait(30)
        while waiting.acquire(blocking=False):
            pass
        ready.wait(30)
        joins = moment == "after one has joined" and rank == (leaver + 1) % SIZE
        if rank == leaver:
            if moment != "before":
                wait_until_asleep(waiting, SIZE - 1)
            leave(how)
            left.set()
            return
        if moment == "before":
            assert left.wait(30)
        with pytest.raises(hvd.HorovodInternalError, match=words) as failure:
            (CALLS["join"] if joins else CALLS[collective])()
        assert how == "shutdown" or failure.value.rank == leaver

    run_ranks(SIZE, main, hosts=hosts, config=Config(stall_check_disable=True))


def test_a_set_without_the_rank_that_left_joins_and_goes_on() -> None:
    gone = threading.Event()

    def main(rank: int) -> None:
        rest = hvd.add_process_set([0, 1, 2])
        if rank == 3:
            current().shutdown()
            gone.set()
            return
        assert gone.wait(30)
        with pytest.raises(hvd.HorovodInternalError, match="rank 3 has been shut down"):
            hvd.join()
        assert hvd.join(process_set=rest) in (0, 1, 2)
        total = hvd.allreduce(np.full(2, rank), op=hvd.Sum, name="t", process_set=rest)
        assert total.tolist() == [3, 3]

    run_ranks(SIZE, main, hosts=[[0, 1], [2, 3]], config=Config(stall_check_disable=True))


# -- a join that nobody ends


@pytest.mark.parametrize("hosts", [None, [[0], [1, 2, 3]], [[0, 1], [2, 3]]])
def test_a_stall_report_names_who_waits_in_join_and_for_whom(
    hosts: list[list[int]] | None,
) -> None:
    def main(rank: int) -> None:
        if rank == 3:
            assert watch.seen.wait(30)
        hvd.join()

    with watching("main thread of rank 3") as watch:
        run_ranks(SIZE, main, hosts=hosts, config=Config(stall_warning_seconds=0.5))
    assert "Ranks 0, 1, 2 wait in join for rank 3.\n" in watch.text
    assert "has not submitted" not in watch.text


@pytest.mark.parametrize("hosts", [None, [[0], [1, 2]]])
def test_a_join_that_waits_too_long_ends_the_job(hosts: list[list[int]] | None) -> None:
    def main(rank: int) -> None:
        if rank == 2:
            current().engine.departed.wait(30)
        with pytest.raises(hvd.HorovodInternalError, match=r"wait in join for rank 2[^$]*ends"):
            hvd.join()

    run_ranks(3, main, hosts=hosts, config=Config(stall_shutdown_seconds=0.4))


def test_a_join_may_wait_for_as_long_as_the_others_go_on() -> None:
    def main(rank: int) -> None:
        if rank == 1:
            for _ in range(12):
                hvd.allreduce(np.ones(1), name="t")
                threading.Event().wait(0.1)  # a training step: together far beyond the limit
        hvd.join()

    with watching("stalled") as watch:
        run_ranks(2, main, config=Config(stall_shutdown_seconds=0.7))
    assert not watch.text


@pytest.mark.parametrize("leaver", ["the coordinator", "the coordinator of two hosts", "a leader"])
def test_a_process_that_ends_after_its_shutdown_while_others_need_its_engine(
    leaver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by os._exit: the exit of Python would wait for the engine."""
    first, hosts = LEAVERS[leaver]
    gone = threading.Event()

    def main(rank: int) -> None:
        runtime = current()
        if rank == first:
            runtime.shutdown()
            monkeypatch.setattr(runtime.engine._control_plane, "abort", lambda error: None)
            runtime.engine.abandon(hvd.HorovodInternalError("the process has ended"))
            runtime.engine.join()
            gone.set()
            return
        assert gone.wait(30)
        runtime.shutdown()
        runtime.engine.join()
        if rank in (2, 3) or leaver != "a leader":
            assert runtime.engine.failed
            with pytest.raises(hvd.HorovodInternalError, match=rf"rank {first} .*os\._exit"):
                hvd.barrier()

    run_ranks(SIZE, main, hosts=hosts)
