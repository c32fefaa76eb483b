"""When short calls are tried, by counts that the ranks keep alike, and when they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.base import Members
from hvdlite.common.collectives.native import short_call
from hvdlite.common.collectives.native.library import library
from hvdlite.common.collectives.native.short_call import Record, ShortExchange
from hvdlite.common.engine import pending
from hvdlite.common.engine import short_calls as short_calls_module
from hvdlite.common.requests.entries import Entry
from hvdlite.common.runtime.current import current
from hvdlite.common.transport.inprocess import InProcessWorld
from tests.ranks import run_ranks, run_threads
from tests.short_calls import (
    GATHER,
    LIMIT_SECONDS,
    begin,
    by_the_data_plane,
    interrupted_after,
    short_calls,
    somebody_has_arrived,
    somebody_waits,
    until,
    was_short,
)

pytestmark = pytest.mark.skipif(library("auto") is None, reason="there is no C++ compiler")


@pytest.mark.parametrize("polled", [2, 5, 6])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_which_some_polled_make_short_calls_again(ranks: int, polled: int) -> None:
    """What a rank has tried alone decides when it tries again; all ranks must do so together."""

    def main(rank: int) -> None:
        data, options = np.full(3, float(rank)), dict[str, Any](name="x", op=hvd.Sum)
        begin()
        hvd.allreduce(data, **options)
        for _ in range(polled):
            (by_the_data_plane if rank else hvd.allreduce)(data, **options)
        before = short_calls().completed
        for _ in range(150):
            hvd.allreduce(data, **options)
        assert short_calls().completed > before

    run_ranks(ranks, main)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_have_failed_alone_try_together(ranks: int) -> None:
    for alone in range(80):
        for other in range(0, 80, 7) if ranks == 3 else (0,):
            records, number = [Record() for _ in range(ranks)], alone
            for record, tries in zip(records, (alone, other), strict=False):
                for _ in range(tries):
                    if not record.skip(number):
                        record.note(completed=False)
                    number += 1
            start = number
            while (trying := [each for each in records if not each.skip(number)]) != records:
                for record in trying:
                    record.note(completed=False)
                number += 1
                assert number < start + 100, (alone, other)


def test_who_missed_a_decline_makes_short_calls_again() -> None:
    """A rank that has not counted a call, and comes first, takes the last decline for a new one."""
    rank_0: list[Any] = [None]

    def main(rank: int) -> None:
        data, options = np.ones(1), dict[str, Any](name="x", op=hvd.Sum)
        rank_0[0] = current() if rank == 0 else rank_0[0]
        begin()
        hvd.allreduce(data, **options)
        by_the_data_plane(data, **options)
        if rank == 0:
            short_calls()._exchange.decline(short_calls()._prepared["allreduce.x"].call)
        hvd.barrier()
        before = short_calls().completed
        for _ in range(10):
            if rank == 0:
                until(lambda: somebody_waits(rank_0[0]) or somebody_has_arrived(rank_0[0]))
            hvd.allreduce(data, **options)
        assert short_calls().completed > before

    run_ranks(2, main)


def test_a_rank_that_forgets_its_calls_tells_those_that_wait(patient: None) -> None:
    def main(rank: int) -> None:
        data, options = np.ones(1), dict[str, Any](name="x", op=hvd.Sum)
        begin()
        was_short(lambda: hvd.allreduce(data, **options))
        by_the_data_plane(data, **options)
        was_short(lambda: hvd.allreduce(data, **options))
        if rank == 1:
            short_calls()._prepared.clear()
        start = time.monotonic()
        hvd.allreduce(data, **options)
        was_short(lambda: hvd.allreduce(data, **options))
        assert time.monotonic() - start < LIMIT_SECONDS / 2

    run_ranks(2, main, config=GATHER)


def test_the_number_of_declines_wraps_around() -> None:
    code = library("auto")
    assert code is not None
    world = InProcessWorld(Topology.single_host(2))
    exchanges = [ShortExchange(world.transport(rank), code) for rank in range(2)]
    calls = []
    for rank, exchange in enumerate(exchanges):
        exchange.open(True)
        calls.append(exchange.prepare(Members((0, 1), rank, world.topology), 7))
        calls[rank].declines, calls[rank].timeout_ns = (1 << 19) - 1, 30 * 10**9
    start = time.monotonic()
    for _ in range(2):
        exchanges[0].decline(calls[0])
        exchanges[1].run(calls[1])  # returns at once
        assert [call.declines for call in calls] == [calls[0].declines] * 2
        assert calls[1].told and not calls[1].completed
    assert time.monotonic() - start < 30  # What a single wait would take.
    run_threads(2, lambda rank: exchanges[rank].run(calls[rank]))
    assert [call.completed for call in calls] == [1, 1]


def test_no_memory_is_told_of_a_call_after_it_was_given_back(patient: None) -> None:
    """The engine may give it back while a training thread declines a bundle."""
    steps: list[str] = []

    def main(rank: int) -> None:
        begin()
        was_short(lambda: hvd.allreduce(np.ones(1), name="x"))
        hvd.barrier()
        if rank:
            return
        found, told, go_on = short_calls(), threading.Event(), threading.Event()

        def decline(call: Any) -> None:
            steps.append("told")
            told.set()
            assert go_on.wait(LIMIT_SECONDS)
            steps.append("ended")

        def release() -> None:
            assert told.wait(LIMIT_SECONDS)
            found.close()
            found.release()

        give_back, exchange = found._exchange.release, found._exchange
        exchange.decline = decline  # type: ignore[method-assign]
        exchange.release = lambda: steps.append("released")  # type: ignore[method-assign]
        entry = Entry(found._prepared["allreduce.x"].request)
        declining = threading.Thread(target=lambda: found.decline([entry]))
        releasing = threading.Thread(target=release)
        for thread in (declining, releasing):
            thread.start()
        assert told.wait(LIMIT_SECONDS)
        releasing.join(0.05)  # long enough for one that does not wait
        go_on.set()
        for thread in (declining, releasing):
            thread.join(LIMIT_SECONDS)
        found.decline([entry])
        give_back()
        assert steps == ["told", "ended", "released"]

    run_ranks(2, main, config=GATHER)


def test_ctrl_c_at_any_point_after_the_exchange(patient: None) -> None:
    """The result counts: the other rank has it, and the next calls go on with the same names."""
    collectives: list[Callable[[], Any]] = [
        lambda: hvd.allreduce(np.ones(1), name="x", op=hvd.Sum),
        lambda: hvd.allgather(np.ones(1), name="y"),
    ]

    modules = [short_calls_module, short_call, pending]

    def main(rank: int) -> None:
        begin()
        for call in collectives:
            was_short(call)
            for points in range(1000):
                go_on = np.zeros(1)
                if rank:
                    was_short(call)
                else:
                    exchange = short_calls()._exchange
                    go_on += interrupted_after(exchange, "run", points, modules, call)
                table = current().engine._pending
                assert not (table._held or table._entries), points
                if not was_short(lambda: hvd.allreduce(go_on, name="go on", op=hvd.Sum))[0]:  # noqa: B023
                    break
            assert 5 < points < 200
            assert was_short(call).sum() == 2

    run_ranks(2, main, config=GATHER)
