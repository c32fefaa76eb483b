"""Clocks of a parameter server: the laws of its modes, over random orders of events."""

from __future__ import annotations

import random
import threading
import time

import pytest

from hvdlite.ps.tables.clocks import ASYNC, SSP, SYNC, Clocks, Mode
from tests.ps.cluster import NewCluster, in_threads, trainers


def train(mode: Mode, workers: int, steps: int, choose: random.Random) -> list[tuple[int, int]]:
    """Let workers pull and push in a random order; return version and difference at each push."""
    clocks = Clocks(mode)
    waiting = {worker: clocks.enter(worker) for worker in range(workers)}  # worker -> pull's clock
    seen = []
    while waiting:
        free = [worker for worker, clock in waiting.items() if clocks.may_pull(worker, clock)]
        assert free, "nobody can go on"
        worker = choose.choice(free if choose.random() < 0.5 else free[:1])
        if waiting[worker] == steps:
            del waiting[worker]
            clocks.leave(worker)
        else:
            assert clocks.push(worker, waiting[worker])
            assert not clocks.push(worker, waiting[worker])  # sent again
            waiting[worker] += 1
            if mode.name != SYNC:
                clocks.update()
        while mode.name == SYNC and (present := clocks.complete()) is not None:
            assert present == sorted(present)
            clocks.update()
        finished = clocks.finished.values()
        seen.append((clocks.version, max(finished, default=0) - min(finished, default=0)))
    return seen


@pytest.mark.parametrize("seed", range(10))
def test_sync_makes_one_update_of_a_step_of_all(seed: int) -> None:
    seen = train(Mode(SYNC), 4, 30, random.Random(seed))
    assert seen[-1][0] == 30
    assert max(difference for _, difference in seen) == 1


@pytest.mark.parametrize("staleness", [0, 2, 8])
def test_staleness_bounds_the_difference(staleness: int) -> None:
    worst = 0
    for seed in range(20):
        seen = train(Mode(SSP, staleness), 4, 40, random.Random(seed))
        assert seen[-1][0] == 160  # every push is an update
        worst = max(worst, *(difference for _, difference in seen))
    assert worst == staleness + 1


@pytest.mark.parametrize("staleness", [0, 2])
def test_workers_are_as_far_apart_as_the_staleness_allows_and_no_further(
    new_cluster: NewCluster, staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, push = [0], Clocks.push

    def noted(self: Clocks, worker: int, clock: int) -> bool:
        found = push(self, worker, clock)
        seen.append(max(self.finished.values()) - min(self.finished.values()))
        return found

    monkeypatch.setattr(Clocks, "push", noted)
    fast, slow = trainers(new_cluster(2, 2), 2, SSP, staleness)
    both, limit = threading.Barrier(2), time.monotonic() + 30

    def follow() -> None:
        both.wait(20)
        for step in range(12):
            end = min(12, step + staleness + 1)  # As far as the other one may go.
            while (seen[-1] < end - step or fast.table.clock < end) and time.monotonic() < limit:
                time.sleep(0.001)
            slow.train(step + 1)

    in_threads(lambda: (both.wait(20), fast.train(12)), follow)
    assert max(seen) == staleness + 1


def test_async_waits_for_nobody() -> None:
    seen = train(Mode(ASYNC), 3, 50, random.Random(1))
    assert seen[-1][0] == 150
    assert max(difference for _, difference in seen) > 20


def test_sync_goes_on_without_who_left_and_waits_for_who_came() -> None:
    clocks = Clocks(Mode(SYNC))
    for worker in range(3):
        clocks.enter(worker)
    clocks.push(0, 0)
    clocks.push(1, 0)
    assert (clocks.late(), clocks.complete()) == ([2], None)
    assert clocks.enter(3) == 1  # this step has begun without it
    clocks.leave(2)
    assert clocks.complete() == [0, 1]
    clocks.update()
    clocks.push(0, 1)
    clocks.leave(0)  # its last push counts
    clocks.push(1, 1)
    assert clocks.late() == [3]
    clocks.push(3, 1)
    assert clocks.complete() == [0, 1, 3]


def test_a_push_ahead_waits_for_its_step() -> None:
    clocks = Clocks(Mode(SYNC))
    clocks.enter(0)
    clocks.enter(1)
    clocks.push(0, 0)
    clocks.push(0, 1)
    assert clocks.complete() is None
    clocks.push(1, 0)
    assert clocks.complete() == [0, 1]
    clocks.update()
    assert clocks.late() == [1]


def test_a_step_is_taken_again_of_a_worker_that_stands_before_it() -> None:
    for mode in (Mode(SYNC), Mode(ASYNC)):
        clocks = Clocks(mode)
        for worker in range(2):
            clocks.enter(worker)
        assert clocks.push(1, 0)
        if mode.name == ASYNC:
            clocks.stand(0, {1: 1})
            assert not clocks.push(1, 0), "it stands where it was"
        clocks.stand(0, {1: 0} if mode.name == ASYNC else {})
        assert clocks.complete() is None
        clocks.enter(2)
        assert clocks.finished == {0: 0, 1: 0, 2: 0}, "who comes now begins with that step, too"
        assert all(clocks.push(worker, 0) for worker in range(3))
        assert mode.name != SYNC or clocks.complete() == [0, 1, 2]
    clocks = Clocks(Mode(ASYNC), 3, {0: 2, 1: 1})
    clocks.stand(0, {0: 1, 1: 2, 2: 5})
    assert clocks.finished == {0: 1, 1: 2}


def test_a_missing_step_is_an_error_and_not_a_deadlock() -> None:
    clocks = Clocks(Mode(SYNC), version=5)
    assert clocks.enter(0) == 5
    with pytest.raises(ValueError, match="worker 0 pushes step 7, and its next step is 5"):
        clocks.push(0, 7)


@pytest.mark.parametrize(
    ("name", "staleness", "said"),
    [
        ("asynchronous", None, "mode is 'asynchronous', which is none of sync, async, ssp"),
        ("sync", 3, "the mode is sync: leave it out, or give mode='ssp'"),
        ("ssp", None, "staleness is None"),
        ("ssp", -1, "staleness is -1"),
        ("ssp", True, "staleness is True"),
        ("ssp", 1.0, "staleness is 1.0"),
    ],
)
def test_a_mode_that_cannot_be_is_refused(name: str, staleness: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Mode(name, staleness)  # type: ignore[arg-type]
