"""Short calls: blocking calls of small data that ranks of a host exchange by themselves.

Whatever is no plain call of all members takes the way through the coordinator, with the same
result.
"""

from __future__ import annotations

import signal
import threading
from random import Random
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.base import Members, Reduction
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.collectives.native.library import library
from hvdlite.common.collectives.native.short_call import Given, ShortExchange, set_data
from hvdlite.common.runtime.current import current, use
from hvdlite.common.runtime.process_sets import global_process_set
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.settings.config import Config
from hvdlite.common.transport.inprocess import InProcessWorld
from tests.ranks import run_ranks, run_threads
from tests.short_calls import (
    GATHER,
    LIMIT_SECONDS,
    begin,
    by_the_data_plane,
    short_calls,
    somebody_has_arrived,
    somebody_waits,
    until,
    was_short,
)
from tests.worlds import IN_PROCESS, TCP

pytestmark = pytest.mark.skipif(library("auto") is None, reason="there is no C++ compiler")
DTYPES = ("float32", "float64", "float16", "bfloat16")


REDUCTIONS: list[dict[str, Any]] = [
    {"op": hvd.Sum},
    {"op": hvd.Average},
    {"op": hvd.Sum, "prescale_factor": 0.3, "postscale_factor": 7.0},
    {"op": hvd.Max},
]


@pytest.mark.parametrize(("ranks", "transport"), [(2, TCP), (3, IN_PROCESS), (5, IN_PROCESS)])
def test_the_result_has_the_bits_of_the_data_plane(
    ranks: int, transport: str, patient: None
) -> None:
    """Sums of floats depend on the order; products of the factors on when they are rounded."""

    def check(data: Any, **options: Any) -> None:
        found = was_short(lambda: hvd.allreduce(data, **options))
        expected = by_the_data_plane(data, **options)
        assert found.tobytes() == expected.tobytes(), options

    def main(rank: int) -> None:
        begin()
        random = np.random.default_rng(rank)
        for dtype in DTYPES:
            for size in (1, 3, 1025, 40_000, 131_001):
                scale = 10.0 ** random.integers(-3, 3)
                data = (random.standard_normal(size) * scale).astype(dtype)
                for number, options in enumerate(REDUCTIONS):
                    check(data, name=f"{dtype}.{size}.{number}", **options)
        for whole in ("int32", "uint8", "bool"):
            check(random.integers(0, 2, 7).astype(whole), name=whole, op=hvd.Sum)

    run_ranks(ranks, main, config=GATHER, transport=transport)


def test_names_that_nobody_gave_and_names_that_come_again(patient: None) -> None:
    def main(rank: int) -> None:
        begin()
        for step in range(40):
            for name in (None, "again"):
                data = np.full(2, float(rank + step))
                total = was_short(lambda: hvd.allreduce(data, name=name, op=hvd.Sum))  # noqa: B023
                assert total.tolist() == [3 + 3 * step] * 2

    run_ranks(3, main, config=GATHER)


def test_nobody_leaves_a_barrier_before_the_last_one_has_come(patient: None) -> None:
    come = [0, 0, 0]

    def main(rank: int) -> None:
        begin()
        random = Random(rank)
        for step in range(1, 60):
            for _ in range(random.randrange(2000)):
                pass
            come[rank] = step
            was_short(hvd.barrier)
            assert min(come) >= step

    run_ranks(3, main, config=GATHER)


def test_process_sets_that_overlap(patient: None) -> None:
    def main(rank: int) -> None:
        begin()
        sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
        for step in range(20):
            for each in sets:
                if each.included():
                    total = was_short(
                        lambda: hvd.allreduce(
                            np.ones(3) * 2.0**rank,
                            name="x",
                            op=hvd.Sum,
                            process_set=each,  # noqa: B023
                        )
                    )
                    assert total.tolist() == [sum(2.0**r for r in each.ranks)] * 3, step

    run_ranks(3, main, config=GATHER)


def test_many_threads_that_wait_at_the_same_time() -> None:
    """Each rank has its threads in another order; two threads of a rank may want one slot."""

    def main(rank: int) -> None:
        runtime = current()

        def thread(number: int) -> None:
            with use(runtime):
                for step in range(15):
                    size = (1, 700, 3000)[number % 3]
                    data = np.full(size, float(rank + step * number))
                    total = hvd.allreduce(data, name=f"thread {number}", op=hvd.Sum)
                    assert total.tolist() == [1.0 + 2 * step * number] * size

        run_threads(8, lambda index: thread((index + 3 * rank) % 8))

    run_ranks(2, main)


def test_a_short_call_does_not_wait_for_what_is_in_flight(patient: None) -> None:
    def main(rank: int) -> None:
        begin()
        late = None
        if rank == 0:
            late = hvd.allreduce_async(np.ones(5), name="late", op=hvd.Sum)
            current().engine._inbox.hurry()
            until(lambda: somebody_waits(current()))
        total = was_short(lambda: hvd.allreduce(np.ones(2), name="x", op=hvd.Sum))
        assert total.tolist() == [2, 2]
        if late is None:
            total = by_the_data_plane(np.ones(5), name="late", op=hvd.Sum)
        else:
            total = hvd.synchronize(late)
        assert total.tolist() == [2] * 5

    run_ranks(2, main, config=GATHER)


def test_who_waits_long_is_known_to_the_coordinator() -> None:
    """A rank that comes late finds the others there, and the call is complete."""
    runtimes: list[Any] = [None, None]

    def main(rank: int) -> None:
        runtimes[rank] = current()
        hvd.barrier()
        for _ in range(3):
            if rank == 1:
                until(lambda: somebody_waits(runtimes[0]))
            assert hvd.allreduce(np.ones(1), name="x", op=hvd.Sum).tolist() == [2]
        for _ in range(2):  # what was late is skipped for a moment, and then tried again
            hvd.barrier()
        assert short_calls().completed > 0

    run_ranks(2, main)


def test_a_rank_that_has_joined_takes_part_in_nothing(patient: None) -> None:
    def main(rank: int) -> None:
        begin()
        for era in "ab":
            was_short(lambda: hvd.allreduce(np.ones(1), name=era, op=hvd.Sum))  # noqa: B023
            if rank == 0:
                for step in range(3):
                    total = hvd.allreduce(np.ones(1), name="alone" if step else era, op=hvd.Sum)
                    assert total.tolist() == [1]
            hvd.join()
            begin()
        assert was_short(lambda: hvd.allreduce(np.ones(1), name="y", op=hvd.Sum)).tolist() == [2]

    run_ranks(2, main, config=GATHER)


def test_a_rank_that_shuts_down_is_named(patient: None) -> None:
    def main(rank: int) -> None:
        begin()
        was_short(lambda: hvd.allreduce(np.ones(1), name="x"))
        if rank == 0:
            with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
                for _ in range(1000):
                    hvd.allreduce(np.ones(1), name="x")

    run_ranks(2, main, config=GATHER)


@pytest.mark.parametrize(
    ("call", "transport"), [(hvd.allreduce, IN_PROCESS), (hvd.allreduce, TCP), (hvd.allgather, TCP)]
)
def test_a_rank_that_dies_is_named(call: Any, transport: str, patient: None) -> None:
    waiting = threading.Event()

    def main(rank: int) -> None:
        begin()
        was_short(lambda: call(np.ones(1), name="x"))
        if rank == 1:
            assert waiting.wait(LIMIT_SECONDS)
            current().transport.close()
            return
        exchange = short_calls()._exchange
        run = exchange.run

        def run_and_tell(*prepared: Any) -> None:
            waiting.set()
            run(*prepared)

        exchange.run = run_and_tell  # type: ignore[method-assign]
        with pytest.raises(hvd.HorovodInternalError, match="rank 1") as failure:
            call(np.ones(1), name="x")
        assert failure.value.rank == 1

    run_ranks(2, main, config=GATHER, transport=transport)


def test_ctrl_c_before_the_exchange(patient: None) -> None:
    """The other rank gets its result, and this one goes on with the same name."""

    def main(rank: int) -> None:
        begin()
        was_short(lambda: hvd.allreduce(np.ones(1), name="x", op=hvd.Sum))
        if rank == 0:
            exchange = short_calls()._exchange
            run = exchange.run

            def interrupted(call: Any) -> None:
                exchange.run = run  # type: ignore[method-assign]
                raise KeyboardInterrupt

            exchange.run = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                hvd.allreduce(np.ones(1), name="x", op=hvd.Sum)
        else:
            assert hvd.allreduce(np.ones(1), name="x", op=hvd.Sum).tolist() == [2]
        hvd.barrier()
        assert hvd.allreduce(np.full(1, 2.0), name="x", op=hvd.Sum).tolist() == [4]

    run_ranks(2, main, config=GATHER)


def test_a_real_ctrl_c_while_the_main_thread_waits() -> None:
    """The exchange itself cannot be interrupted, but ends soon; the tensor is reported."""
    world = InProcessWorld(Topology.single_host(2))
    global_process_set._bind(0, range(2))
    runtimes = run_threads(2, lambda rank: Runtime(world.transport(rank), Config()))
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def call(rank: int) -> Any:
        with use(runtimes[rank]):
            return hvd.allreduce(np.ones(1), name="x", op=hvd.Sum)

    def interrupt() -> None:
        # On a busy machine the exchange may be over before this thread has seen it.
        until(lambda: somebody_has_arrived(runtimes[0]) or somebody_waits(runtimes[0]))
        signal.pthread_kill(main_thread, signal.SIGINT)

    try:
        other = threading.Thread(target=interrupt)
        other.start()
        with pytest.raises(KeyboardInterrupt):
            call(0)
        other.join(LIMIT_SECONDS)
        assert call(1).tolist() == [2]
    finally:
        run_threads(2, lambda rank: runtimes[rank].shutdown())
        global_process_set.ranks = None


def test_the_timeline_and_observers_see_all_calls(tmp_path: Any, patient: None) -> None:
    """Short calls are shown to observers; with a timeline, on any rank, there are none."""

    def main(rank: int) -> None:
        begin()
        was_short(lambda: hvd.allreduce(np.ones(1), name="x"))
        runs: list[Any] = []
        stop = current().engine.observe(runs.append) if rank == 1 else (lambda: None)
        before = short_calls().completed
        for _ in range(3):
            hvd.allreduce(np.ones(1), name="x")
        assert short_calls().completed == before + 3
        if rank == 1:
            assert [run.names for run in runs] == [("allreduce.x",)] * 3
            assert all(run.bytes == 8 and run.start <= run.end for run in runs)
        stop()
        for _ in range(2):
            hvd.allreduce(np.ones(1), name="y")
        if rank == 0:
            hvd.start_timeline(str(tmp_path / "timeline.json"))
        hvd.allreduce(np.ones(1), name="shown")
        hvd.barrier()
        if rank == 0:
            hvd.stop_timeline()
            assert "allreduce.shown" in (tmp_path / "timeline.json").read_text()

    run_ranks(2, main, config=GATHER)


def test_what_is_not_reduced_in_shared_memory_by_compiled_code() -> None:
    """Adasum, rings that the user wishes for, integers that are scaled, groups."""

    def main(rank: int) -> None:
        begin()
        before = short_calls().completed
        ones = np.ones(2, np.float32)
        assert hvd.allreduce(ones, name="adasum", op=hvd.Adasum).tolist() == [1, 1]
        whole = np.full(2, 3, np.int32)
        assert hvd.allreduce(whole, name="scaled", op=hvd.Average).tolist() == [3, 3]
        (total,) = hvd.grouped_allreduce([ones], name="group", op=hvd.Sum)
        assert total.tolist() == [2, 2]
        assert short_calls().completed == before

    def ring(rank: int) -> None:
        assert hvd.allreduce(np.ones(2), name="x", op=hvd.Sum).tolist() == [2, 2]
        assert short_calls().completed == 0

    run_ranks(2, main)
    run_ranks(2, ring, config=Config(allreduce="ring"))


def test_a_host_without_the_code_needs_none() -> None:
    def main(rank: int) -> None:
        assert current().engine._short_calls is None
        assert hvd.allreduce(np.ones(1), name="x", op=hvd.Sum).tolist() == [2]

    run_ranks(2, main, config=Config(native="off"))


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("size", [0, 4, 1 << 20])
def test_a_round_is_completed_by_all_or_by_none(size: int, divided: bool) -> None:
    """Ranks withdraw, decline and come too late at random times. Slots are shared by calls.

    A divided round can also be abandoned when all have come. The input is whole after that.
    """
    ranks, rounds, found = 3, 300 if size < 100 or divided else 30, library("auto")
    assert found is not None
    world, code = InProcessWorld(Topology.single_host(ranks)), found
    all_came, outcomes = threading.Barrier(ranks), [[False] * ranks for _ in range(2)]

    def main(rank: int) -> int:
        exchange, random = ShortExchange(world.transport(rank), code), Random(rank)
        exchange.open(True)
        members = Members(tuple(range(ranks)), rank, world.topology)
        calls = [exchange.prepare(members, number << 40) for number in range(2)]
        source = np.empty(size // 4, np.float32)
        target = source if divided else np.empty_like(source)
        for call in calls if size else ():
            arithmetic = Arithmetic(source.dtype, Reduction(ReduceOp.SUM))
            exchange.add_data(call, Given(size, arithmetic, divided=divided))
            call.nbytes = call.taken = size
            set_data(call, source, target)
        completed = 0
        all_came.wait(LIMIT_SECONDS)
        for step in range(rounds):
            call = calls[step % 2]
            source.fill(step + rank)
            call.timeout_ns = random.choice((0, 20_000, 200_000, 10**9 if step % 3 else 0))
            if random.random() < 0.1:
                exchange.decline(call)
                outcomes[step % 2][rank] = False
            else:
                exchange.run(call)
                outcomes[step % 2][rank] = bool(call.completed)
            all_came.wait(LIMIT_SECONDS)
            assert len(set(outcomes[step % 2])) == 1, (step, outcomes)
            if call.completed and outcomes[step % 2][rank]:
                completed += 1
                assert (target == ranks * step + 3).all()
            else:
                assert (source == step + rank).all()
        return completed

    results = run_threads(ranks, main)
    assert len(set(results)) == 1
    assert 0 < results[0] < rounds
