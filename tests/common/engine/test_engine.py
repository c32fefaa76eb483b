"""What a user sees of the engine: mismatches, joins, groups, process sets, departures, stalls."""

from __future__ import annotations

import itertools
import os
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.base import user_frames
from hvdlite.common.base.errors import ConfigError, PeerLostError
from hvdlite.common.decisions.stall_inspector import StallInspector, Waiting
from hvdlite.common.engine import tree_links
from hvdlite.common.requests.entries import Entry
from hvdlite.common.requests.messages import Abort, Request, encode
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from hvdlite.common.tensors.adapter import HOST_DEVICE
from tests.common.watching import watching
from tests.ranks import run_ranks
from tests.worlds import IN_PROCESS, TCP

ONE_HOST: list[list[int]] | None = None
TREE = [[0, 1], [2, 3]]
THREE_HOSTS = [*TREE, [4, 5]]


def size_of(hosts: list[list[int]] | None) -> int:
    """The number of ranks."""
    return sum(map(len, hosts)) if hosts else 4


# Each: what the ranks call for one name, and the words that the error must have.
MISMATCHES = {
    "dtype": (
        lambda r: hvd.allreduce(np.zeros(3, "float32" if r else "float64"), name="t"),
        ["data type", "rank 0 has float64", "rank 1 has float32"],
    ),
    "shape": (
        lambda r: hvd.allreduce(np.zeros((2, 3 + r)), name="t"),
        ["shape", "rank 0 has (2, 3)", "rank 1 has (2, 4)"],
    ),
    "rows": (
        lambda r: hvd.allgather(np.zeros((2, 3 + r)), name="t"),
        ["shape after the first dimension", "rank 0 has (3,)", "rank 1 has (4,)"],
    ),
    "reduce op": (
        lambda r: hvd.allreduce(np.zeros(3), name="t", op=hvd.Sum if r else hvd.Min),
        ["reduction operation", "rank 0 has Min", "rank 1 has Sum"],
    ),
    "root": (
        lambda r: hvd.broadcast(np.zeros(3), r, name="t"),
        ["root rank", "rank 0 has 0", "rank 1 has 1"],
    ),
    "prescale": (
        lambda r: hvd.allreduce(np.zeros(3), name="t", prescale_factor=1.0 + r),
        ["prescale factor", "rank 0 has 1.0", "rank 1 has 2.0"],
    ),
    "postscale": (
        lambda r: hvd.reducescatter(np.zeros(3), name="t", postscale_factor=1.0 + r),
        ["postscale factor", "rank 0 has 1.0", "rank 1 has 2.0"],
    ),
}


@pytest.mark.parametrize("hosts", [ONE_HOST, [[0], [1]]])
def test_a_mismatch_names_both_ranks_and_values_and_fails_that_tensor_only(
    hosts: list[list[int]] | None,
) -> None:
    def main(rank: int) -> list[str]:
        texts = []
        for call, _ in MISMATCHES.values():
            good = hvd.allreduce_async(np.ones(4), name="good", op=hvd.Sum)
            with pytest.raises(hvd.HorovodInternalError) as failure:
                call(rank)
            assert hvd.synchronize(good).tolist() == [2.0] * 4
            assert hvd.allreduce(np.ones(4), name="t", op=hvd.Sum).tolist() == [2.0] * 4
            texts.append(str(failure.value))
        return texts

    texts, others = run_ranks(2, main, hosts=hosts)
    assert texts == others
    for text, (_, words) in zip(texts, MISMATCHES.values(), strict=True):
        assert all(word in text for word in ["'", ".t'", *words]), text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"collective": "broadcast"}, "the operation: rank 0 has allreduce, rank 1 has broadcast"),
        ({"device": "cuda"}, f"device: rank 0 has {HOST_DEVICE}, rank 1 has cuda"),
        ({"group": "g", "group_size": 1}, "group: rank 0 has none, rank 1 has g"),
    ],
)
def test_requests_that_no_two_calls_of_one_framework_make(
    fields: dict[str, Any], words: str
) -> None:
    def main(rank: int) -> str:
        request = Request(0, "t", "allreduce", "float32", (3,), HOST_DEVICE)
        entry = Entry(request._replace(**fields) if rank else request)
        current().engine.enqueue([entry])
        with pytest.raises(hvd.HorovodInternalError) as failure:
            entry.handle.wait()
        return str(failure.value)

    for text in run_ranks(2, main):
        assert text.endswith(f"'t': ranks disagree on {words}")


@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize("hosts", [ONE_HOST, TREE])
def test_rows_that_change_on_some_ranks_only(hosts: list[list[int]] | None, late: int) -> None:
    """Some send the bit of an earlier answer, others a new request, in every order."""
    turns = [threading.Event() for _ in range(6)]

    def main(rank: int) -> None:
        for step, turn in enumerate(turns):
            if rank == late:
                turn.wait(30)
            rows = [2, 3 + step, 2, 1 + step % 2]
            handle = hvd.allgather_async(np.full((rows[rank], 1), rank), name="x")
            if rank == (late + 1) % 4:
                turn.set()
            gathered = hvd.synchronize(handle)
            assert gathered[:, 0].tolist() == [r for r in range(4) for _ in range(rows[r])]

    run_ranks(4, main, hosts=hosts, config=Config(stall_check_disable=True))


def test_a_departure_below_a_leader_is_answered_at_once() -> None:
    left = threading.Event()

    def main(rank: int) -> None:
        pair = hvd.add_process_set([2, 3])
        if rank == 3:
            current().shutdown()
            left.set()
        elif rank == 2:
            early = hvd.allreduce_async(np.ones(1), name="early", process_set=pair)
            assert left.wait(30)
            late = hvd.allreduce_async(np.ones(1), name="late", process_set=pair)
            for handle in (early, late):
                with pytest.raises(hvd.HorovodInternalError, match="rank 3 has been shut down"):
                    hvd.synchronize(handle)

    run_ranks(4, main, hosts=TREE, config=Config(stall_check_disable=True))


@pytest.mark.parametrize("prescale", [2.0, 0.5, -1.0, 0.0])
def test_a_joined_rank_is_neutral_after_prescaling(prescale: float) -> None:
    def main(rank: int) -> None:
        if rank == 1:
            hvd.join()
            return
        for dtype in ("float32", "int32", "int64", "uint64", "bool"):
            for op in (hvd.Min, hvd.Max, hvd.Product):
                array = np.array([4, 6 if dtype == "uint64" else -6]).astype(dtype)
                expected = (array * prescale).astype(dtype).tolist()
                if dtype == "uint64" and prescale < 0:
                    continue
                reduce = partial(
                    hvd.allreduce, array, op=op, prescale_factor=prescale, name=f"{dtype}.{op.name}"
                )
                if (op, prescale) == (hvd.Product, 2.0) and dtype in ("int32", "int64", "uint64"):
                    with pytest.raises(hvd.HorovodInternalError, match=r"no u?int\d+ becomes 1"):
                        reduce()
                else:
                    assert reduce().tolist() == expected
        hvd.join()

    run_ranks(2, main)


def test_unnamed_calls_are_numbered_by_process_set() -> None:
    def main(rank: int) -> None:
        first = hvd.add_process_set([0, 1])
        if first.included():
            hvd.allreduce(np.ones(1), process_set=first)
        assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [3.0]

    run_ranks(3, main)


def test_unnamed_calls_agree_after_a_join_and_after_a_refused_call() -> None:
    def main(rank: int) -> None:
        if rank == 0:
            hvd.allreduce(np.ones(1))
            with pytest.raises(ValueError, match="is not supported"):
                hvd.allreduce(np.array(["text"]))
        hvd.join()
        assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [2.0]

    run_ranks(2, main)


def test_a_changed_shape_is_negotiated_anew_and_a_mismatch_of_it_is_found() -> None:
    def main(rank: int) -> None:
        for length in (3, 3, 3, 5, 5, 3):
            result = hvd.allreduce(np.ones(length), name="t", op=hvd.Sum)
            np.testing.assert_array_equal(result, np.full(length, 3.0))
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 0 has \(3,\), rank 2 has \(4,\)"):
            hvd.allreduce(np.ones(4 if rank == 2 else 3), name="t")
        assert hvd.allreduce(np.ones(3), name="t", op=hvd.Sum).tolist() == [3.0] * 3

    run_ranks(3, main)


def test_a_name_that_is_pending_is_refused_at_the_call() -> None:
    def main(rank: int) -> None:
        if rank == 0:
            handle = hvd.allreduce_async(np.ones(2), name="t", op=hvd.Sum)
            with pytest.raises(ValueError, match=r"'allreduce.t' on rank 0 has the same name"):
                hvd.allreduce_async(np.ones(2), name="t", op=hvd.Sum)
            hvd.barrier()
        else:
            hvd.barrier()
            handle = hvd.allreduce_async(np.ones(2), name="t", op=hvd.Sum)
        assert hvd.synchronize(handle).tolist() == [2.0, 2.0]

    run_ranks(2, main)


def test_poll_and_unknown_handles() -> None:
    def main(rank: int) -> None:
        if rank == 1:
            hvd.barrier()
        handle = hvd.allreduce_async(np.ones(2), name="t")
        if rank == 0:
            assert not hvd.poll(handle)
            hvd.barrier()
        hvd.synchronize(handle)
        assert hvd.synchronize(handle) is None
        with pytest.raises(ValueError, match="not created or has been cleared"):
            hvd.poll(handle)

    run_ranks(2, main)


@pytest.mark.parametrize("hosts", [ONE_HOST, TREE])
def test_joined_ranks_give_nothing_to_any_collective(hosts: list[list[int]] | None) -> None:
    """Rank 1 joins at once, then rank 3, and the others go on with every collective."""
    size = 4

    def main(rank: int) -> int:
        for warm in range(2):  # the second time from the cache
            hvd.allreduce(np.ones(3) * warm, name="sum", op=hvd.Sum)
            hvd.allgather(np.full((rank + 1, 2), rank), name="rows")
        if rank == 1:
            return hvd.join()
        for _ in range(2):
            assert hvd.allreduce(np.full(3, rank), name="sum", op=hvd.Sum).tolist() == [5] * 3
            assert hvd.allreduce(np.full(2, 8.0), name="avg").tolist() == [6.0] * 2
            assert hvd.allreduce(np.full(2, rank), name="min", op=hvd.Min).tolist() == [0, 0]
            assert hvd.allreduce(np.full(2, -1), name="max", op=hvd.Max).tolist() == [-1, -1]
            product = hvd.allreduce(np.full(2, rank + 1.0), name="prod", op=hvd.Product)
            assert product.tolist() == [12.0] * 2
            gathered = hvd.allgather(np.full((rank + 1, 2), rank), name="rows")
            assert gathered[:, 0].tolist() == [0, 2, 2, 2, 3, 3, 3, 3]
            assert hvd.broadcast(np.full(2, rank), 2, name="root").tolist() == [2, 2]
            sent, splits = hvd.alltoall(np.full(4, rank), [1, 1, 1, 1], name="all")
            assert sent.tolist() == [0, 2, 3] and splits.tolist() == [1, 0, 1, 1]
            scattered = hvd.reducescatter(np.full(4, rank), name="scatter", op=hvd.Sum)
            assert scattered.tolist() == [5]
            with pytest.raises(hvd.HorovodInternalError, match="root rank 1 has joined"):
                hvd.broadcast(np.full(2, rank), 1, name="gone")
            hvd.barrier()
        if rank != 3:
            hvd.barrier()
        if rank == 3:
            return hvd.join()
        assert hvd.allreduce(np.full(3, rank), name="sum", op=hvd.Sum).tolist() == [2] * 3
        return hvd.join()

    def again(rank: int) -> int:
        last = main(rank)
        assert hvd.allreduce(np.full(3, rank), name="sum", op=hvd.Sum).tolist() == [6] * 3
        return last

    last = run_ranks(size, again, hosts=hosts)
    assert len(set(last)) == 1 and last[0] in (0, 2)


def test_join_in_a_process_set_leaves_the_global_set_alone() -> None:
    def main(rank: int) -> None:
        some = hvd.add_process_set([0, 2])
        if rank == 0:
            assert hvd.join(process_set=some) == 2
        elif rank == 2:
            assert hvd.allreduce(np.ones(2), op=hvd.Sum, process_set=some).tolist() == [1, 1]
            assert hvd.join(process_set=some) == 2
        assert hvd.allreduce(np.ones(2), name="all", op=hvd.Sum).tolist() == [3, 3]

    run_ranks(3, main)


@pytest.mark.parametrize("keep_groups", [False, True])
def test_a_group_is_answered_as_one(keep_groups: bool) -> None:
    def main(rank: int) -> None:
        for _ in range(3):
            tensors = [np.full(n, rank + 1.0) for n in (1, 5, 0, 3)]
            results = hvd.grouped_allreduce(tensors, name="g", op=hvd.Sum)
            assert [r.tolist() for r in results] == [[3.0], [3.0] * 5, [], [3.0] * 3]
            hvd.grouped_allreduce_(tensors, name="in", op=hvd.Sum)
            assert tensors[3].tolist() == [3.0] * 3
            rows = hvd.grouped_allgather([np.full((rank, 2), rank), np.ones((1, 1))], name="r")
            assert [r.shape for r in rows] == [(1, 2), (2, 1)]
            parts = hvd.grouped_reducescatter([np.arange(3), np.arange(2)], name="s", op=hvd.Sum)
            assert [p.tolist() for p in parts] == ([[0, 2], [0]] if rank == 0 else [[4], [2]])
        assert [*hvd.grouped_allreduce([], name="none"), *hvd.grouped_allreduce_([])] == []

    run_ranks(2, main, config=Config(disable_group_fusion=keep_groups))


def test_a_mismatch_in_a_group_fails_the_group_and_nothing_else() -> None:
    def main(rank: int) -> None:
        for _ in range(2):
            tensors = [np.ones(2), np.ones(3 + rank), np.ones(4)]
            handle = hvd.grouped_allreduce_async(tensors, name="g")
            other = hvd.allreduce_async(np.ones(2), name="other", op=hvd.Sum)
            with pytest.raises(hvd.HorovodInternalError, match=r"'grouped_allreduce.g_2of3'"):
                hvd.synchronize(handle)
            assert hvd.synchronize(other).tolist() == [2, 2]
        good = hvd.grouped_allreduce([np.ones(2), np.ones(3), np.ones(4)], name="g", op=hvd.Sum)
        assert good[1].tolist() == [2, 2, 2]

    run_ranks(2, main)


def test_groups_of_different_sizes_fail_on_every_rank() -> None:
    def main(rank: int) -> None:
        for step in range(6):
            wrong = (1, 3)[step // 2 % 2] if rank == 2 else 2
            count = wrong if step % 2 else 2  # right and wrong in turn
            other = hvd.allreduce_async(np.ones(2), name="other", op=hvd.Sum)
            handle = hvd.grouped_allreduce_async([np.ones(2)] * count, name="g", op=hvd.Sum)
            if step % 2:
                words = r"number of tensors in the group: rank \d has [123], rank \d has [123]"
                with pytest.raises(hvd.HorovodInternalError, match=words):
                    hvd.synchronize(handle)
                hvd.barrier()
            else:
                assert [each.tolist() for each in hvd.synchronize(handle)] == [[3, 3]] * 2
            assert hvd.synchronize(other).tolist() == [3, 3]

    run_ranks(3, main)


def test_process_sets_are_added_used_and_removed() -> None:
    def main(rank: int) -> None:
        for _ in range(3):
            first, second = hvd.add_process_set([0, 1]), hvd.add_process_set(range(1, 3))
            assert (first.process_set_id, second.process_set_id) == (1, 2)
            assert first.size() == 2 and first.included() == (rank < 2)
            for ranks in ([1, 0], [0, 1, 2]):
                with pytest.raises(ValueError, match="duplicate process set"):
                    hvd.add_process_set(ranks)
            with pytest.raises(ValueError, match="rank 7 does not exist"):
                hvd.add_process_set([0, 7])
            for process_set in (first, second):
                if process_set.included():
                    total = hvd.allreduce(
                        np.full(2, rank), name="t", op=hvd.Sum, process_set=process_set
                    )
                    assert total.tolist() == [sum(process_set.ranks or [])] * 2
            if rank == 0:
                with pytest.raises(ValueError, match="Rank 0 is not a member"):
                    hvd.allreduce(np.ones(1), name="t", process_set=second)
                with pytest.raises(ValueError, match="not part of provided process set"):
                    second.rank()
            assert hvd.remove_process_set(first) and hvd.remove_process_set(second)
            assert not hvd.remove_process_set(first)
            assert not hvd.remove_process_set(hvd.global_process_set)
            with pytest.raises(ValueError, match="does not exist"):
                hvd.allreduce(np.ones(1), process_set=first)

    run_ranks(3, main)


def test_what_waits_in_a_process_set_that_is_removed_fails() -> None:
    def main(rank: int) -> None:
        pair = hvd.add_process_set([0, 1])
        waits = hvd.allreduce_async(np.ones(2), name="t", process_set=pair) if rank == 0 else None
        assert hvd.remove_process_set(pair)
        if waits is not None:
            with pytest.raises(hvd.HorovodInternalError, match=r"'allreduce.t'.* been removed"):
                hvd.synchronize(waits)
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="after").tolist() == [3]

    run_ranks(3, main)


def test_a_rank_that_shuts_down_fails_what_needs_it_and_nothing_else() -> None:
    barrier = threading.Barrier(3)

    def main(rank: int) -> None:
        pair = hvd.add_process_set([0, 2])
        hvd.barrier()
        if rank == 1:
            current().shutdown()
            barrier.wait(10)
            with pytest.raises(hvd.HorovodInternalError, match="has been shut down"):
                hvd.allreduce(np.ones(2), name="t")
            barrier.wait(10)
            return
        barrier.wait(10)
        with pytest.raises(hvd.HorovodInternalError, match="rank 1 has been shut down"):
            hvd.allreduce(np.ones(2), name="t")
        assert hvd.allreduce(np.ones(2), op=hvd.Sum, process_set=pair).tolist() == [2, 2]
        barrier.wait(10)

    run_ranks(3, main)


@pytest.mark.parametrize("transport", [IN_PROCESS, TCP])
@pytest.mark.parametrize(
    ("hosts", "victim"),
    [
        (hosts, victim)
        for hosts in (ONE_HOST, TREE, THREE_HOSTS)
        for victim in range(size_of(hosts))
    ],
)
def test_a_lost_rank_fails_everybody_with_its_number(
    hosts: list[list[int]] | None, victim: int, transport: str
) -> None:
    size = size_of(hosts)
    ready = threading.Barrier(size)

    def main(rank: int) -> None:
        hvd.barrier()
        ready.wait(30)
        if rank == victim:
            current().transport.close()  # as the kernel does when a process dies
            return
        current().engine.departed.wait(10)  # an idle rank hears of it, too
        for attempt in range(2):
            with pytest.raises(hvd.HorovodInternalError, match=f"rank {victim} is gone") as failure:
                hvd.allreduce(np.ones(2), name=f"t{attempt}")
            assert failure.value.rank == victim

    run_ranks(size, main, hosts=hosts, transport=transport)


def test_a_foreign_control_message_ends_the_job_with_a_clear_error() -> None:
    def main(rank: int) -> None:
        hvd.barrier()
        if rank == 1:
            current().transport.send(0, b"GET / HTTP/1.1")
        with pytest.raises(hvd.HorovodInternalError, match="hvdlite cannot have sent") as failure:
            for attempt in itertools.count():  # Short calls do not wait for the engine thread.
                hvd.allreduce(np.ones(1), name=f"t{attempt}")
        assert failure.value.rank == 1

    run_ranks(2, main)


@pytest.mark.parametrize("hosts", [ONE_HOST, TREE])
def test_a_stall_is_reported_with_names_ranks_and_stacks(hosts: list[list[int]] | None) -> None:
    def main(rank: int) -> None:
        hvd.barrier()
        if rank == 3:
            assert watch.seen.wait(30)
        handles = [hvd.allreduce_async(np.ones(1), name=f"t{i}") for i in range(8)]
        for handle in handles:
            hvd.synchronize(handle)

    with watching("main thread of rank 3") as watch:
        run_ranks(4, main, config=Config(stall_warning_seconds=0.6), hosts=hosts)
    text = watch.text
    assert "Rank 3 has not submitted: allreduce.t0, allreduce.t1" in text
    assert "and 2 more" in text
    assert "Rank 2 has not submitted" not in text
    assert "seen.wait(30)" in text or "run_ranks" in text  # where the main thread stands


def test_a_stall_beyond_the_limit_ends_the_job() -> None:
    def main(rank: int) -> None:
        if rank == 0:
            with pytest.raises(hvd.HorovodInternalError, match="the job ends") as failure:
                hvd.allreduce(np.ones(1), name="t")
            assert failure.value.rank == 1
        else:
            current().engine.departed.wait(30)
            with pytest.raises(hvd.HorovodInternalError, match="Rank 1 has not submitted"):
                hvd.allreduce(np.ones(1), name="t")

    config = Config(stall_warning_seconds=0.1, stall_shutdown_seconds=0.3)
    run_ranks(2, main, config=config)


def test_settings_that_do_not_work_together_are_an_error_at_init() -> None:
    def main(rank: int) -> None:
        runtime = current()
        object.__setattr__(runtime, "config", Config(data_plane=["ring", "shm"][rank]))
        with pytest.raises(
            hvd.HorovodInternalError, match=r"rank 0 has .*=ring.*rank 1 has .*=shm"
        ):
            runtime.begin([], first=True)

    run_ranks(2, main)


# -- text, memory and signals that the engine must bear

NOT_UTF8 = "caf\udce9"


def test_the_engine_runs_on_the_core_of_the_settings_or_not_at_all() -> None:
    core = min(os.sched_getaffinity(0))

    def cores(rank: int) -> set[int]:
        (engine,) = (each for each in threading.enumerate() if each.name == "hvdlite-engine")
        return os.sched_getaffinity(engine.native_id or 0)

    assert run_ranks(1, cores, config=Config(thread_affinity=(core,))) == [{core}]
    with pytest.raises(ConfigError, match=r"AFFINITY=99999: rank 0 cannot use core 99999: .*other"):
        run_ranks(1, cores, config=Config(thread_affinity=(99999,)))
    with pytest.raises(ConfigError, match=rf"AFFINITY={core}: rank 1 has local rank 1: name a co"):
        run_ranks(2, lambda rank: None, config=Config(thread_affinity=(core,)))


def test_a_name_that_cannot_be_sent_is_refused_at_the_call() -> None:
    calls: list[Any] = [
        lambda: hvd.allreduce(np.ones(2), name=NOT_UTF8),
        lambda: hvd.allgather_async(np.ones(2), name=NOT_UTF8),
        lambda: hvd.broadcast_(np.ones(2), 0, name=NOT_UTF8),
        lambda: hvd.alltoall(np.ones(2), name=NOT_UTF8),
        lambda: hvd.reducescatter(np.ones(2), name=NOT_UTF8),
        lambda: hvd.grouped_allreduce([np.ones(2)], name=NOT_UTF8),
    ]

    def main(rank: int) -> None:
        for call in calls:
            with pytest.raises(ValueError, match=r"'.*caf\\udce9.*': the name cannot be sent"):
                call()
        assert hvd.allreduce(np.ones(2), name="café", op=hvd.Sum).tolist() == [2, 2]

    run_ranks(2, main)


@pytest.mark.parametrize("hosts", [ONE_HOST, TREE])
def test_a_stack_that_is_not_utf8_is_reported_and_the_job_goes_on(
    hosts: list[list[int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = f'  File "/home/{NOT_UTF8}/train.py", line 1'
    monkeypatch.setattr(user_frames, "stack_of_user", lambda frame: stack)

    def main(rank: int) -> None:
        if rank == 3:
            assert watch.seen.wait(30)
        assert hvd.allreduce(np.ones(2), name="t", op=hvd.Sum).tolist() == [4, 4]

    with watching("main thread of rank 3") as watch:
        run_ranks(4, main, hosts=hosts, config=Config(stall_warning_seconds=0.3))
    assert r"caf\udce9/train.py" in watch.text


def test_a_failure_whose_text_is_not_utf8_reaches_every_rank() -> None:
    class Broken(Entry):
        @property
        def input(self) -> Any:
            raise OSError(f"cannot read {NOT_UTF8}")

    def main(rank: int) -> None:
        request = Request(0, "t", "allreduce", "float32", (3,), HOST_DEVICE)
        entry = (Broken if rank == 1 else TensorOfOnes)(request)
        current().engine.enqueue([entry])
        with pytest.raises(
            hvd.HorovodInternalError, match=r"rank 1 could not run.*cannot read caf"
        ):
            entry.handle.wait()

    run_ranks(2, main)


class TensorOfOnes(Entry):
    @property
    def input(self) -> Any:
        return np.ones(3, np.float32)

    def output(self, shape: tuple[int, ...]) -> Any:
        return np.empty(shape, np.float32).reshape(-1)


def test_a_failure_that_cannot_be_told_still_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(message: Any) -> bytes:
        if isinstance(message, Abort):
            raise RuntimeError("no message can be made")
        return encode(message)

    monkeypatch.setattr(tree_links, "encode", refuse)

    def main(rank: int) -> None:
        if rank == 1:
            current().transport.send(0, b"GET / HTTP/1.1")
        with pytest.raises(hvd.HorovodInternalError):
            for attempt in range(100):
                hvd.allreduce(np.ones(1), name=f"t{attempt}")
        current().engine.join()

    run_ranks(2, main)


@pytest.mark.parametrize("transport", [IN_PROCESS, TCP])
@pytest.mark.parametrize("backend", ["auto", "ring"])
def test_the_rank_that_died_is_named_by_all_while_they_run_a_collective(
    backend: str, transport: str
) -> None:
    """Rank 3 dies inside a collective: no other rank is blamed, and no chain of texts grows."""

    class Dying(TensorOfOnes):
        @property
        def input(self) -> Any:
            current_of[3].transport.close()
            raise PeerLostError("as if the process had ended here", 3)

    current_of: dict[int, Any] = {}

    def main(rank: int) -> tuple[int | None, str]:
        current_of[rank] = current()
        hvd.barrier()
        entry = (Dying if rank == 3 else TensorOfOnes)(
            Request(0, "t", "allreduce", "float32", (3,), HOST_DEVICE)
        )
        current().engine.enqueue([entry])
        with pytest.raises(hvd.HorovodInternalError) as failure:
            entry.handle.wait()
        return failure.value.rank, str(failure.value)

    config = Config(data_plane=backend, allreduce=backend, native="off")
    for rank, text in run_ranks(4, main, hosts=TREE, config=config, transport=transport):
        assert rank == 3, text
        assert "could not run" not in text


SHARED = {
    "the same array twice": lambda whole: [whole, whole],
    "a part and the whole": lambda whole: [np.ones(3), whole[2:5], np.ones(2), whole],
    "parts that overlap": lambda whole: [whole[:5], whole[4:]],
    "a reshaped view": lambda whole: [whole.reshape(2, 4), whole[7:]],
}


@pytest.mark.parametrize("case", SHARED)
def test_an_in_place_group_whose_tensors_share_memory_is_refused(case: str) -> None:
    def main(rank: int) -> None:
        tensors = SHARED[case](np.ones(8))
        for call in (hvd.grouped_allreduce_, hvd.grouped_allreduce_async_):
            with pytest.raises(ValueError, match=r"'.*g_\dof\d' and '.*g_\dof\d' share memory"):
                call(tensors, name="g")
        hvd.grouped_allreduce_([each.copy() for each in tensors], name="g", op=hvd.Sum)
        if case == "the same array twice":  # found also under a name that was right before
            with pytest.raises(ValueError, match="share memory"):
                hvd.grouped_allreduce_(tensors, name="g", op=hvd.Sum)
        results = hvd.grouped_allreduce(tensors, name="g", op=hvd.Sum)  # not in place: allowed
        assert all((result == 2).all() for result in results)
        whole = np.ones((4, 2))
        apart = [whole[:2], whole[2:], whole[4:], np.ones(0), np.ones(0)]  # they only touch
        hvd.grouped_allreduce_(apart, name="g", op=hvd.Sum)
        assert (whole == 2).all()

    run_ranks(2, main)


def test_group_sizes_that_differ_below_a_leader_are_an_error_at_once() -> None:
    """The stall check is off: nothing but the leader finds it. By request, by bit, and mixed."""

    def main(rank: int) -> None:
        for step in range(8):
            count = 3 if rank == 2 and step % 2 else 2
            tensors = [np.ones(2)] * count
            if step % 2:
                words = r"number of tensors in the group: rank \d has [23], rank \d has [23]"
                with pytest.raises(hvd.HorovodInternalError, match=words):
                    hvd.grouped_allreduce(tensors, name="g", op=hvd.Sum)
            else:
                size = 3 if step % 4 else 2
                group = hvd.grouped_allreduce([np.ones(2)] * size, name="g", op=hvd.Sum)
                assert [each.tolist() for each in group] == [[4, 4]] * size
            hvd.barrier()

    run_ranks(4, main, hosts=[[0], [1, 2, 3]], config=Config(stall_check_disable=True))


def test_a_rank_that_has_joined_is_refused_in_another_thread() -> None:
    joined = threading.Event()

    def main(rank: int) -> int:
        if rank == 1:
            assert joined.wait(30)
            return int(hvd.join())
        runtime = current()
        entry = Entry(Request(0, "join.noname", "join"))
        runtime.engine.enqueue([entry])
        with pytest.raises(ValueError, match=r"has called join\(\), which has not returned"):
            hvd.allreduce(np.ones(1), name="t")
        joined.set()
        return int(entry.handle.wait())

    # Rank 0 was first to call, but the coordinator may hear of rank 1 first.
    last, other = run_ranks(2, main)
    assert last == other and last in (0, 1)


def test_a_short_stall_time_gives_one_report_a_second() -> None:
    inspector, now, reports = StallInspector(0.001, 0), 0.0, 0
    while (now := max(now, inspector.next_check(0.0))) < 10:
        reports += inspector.inspect([Waiting(f"t{now}", (1,), 0.0)], now) is not None
    assert 9 <= reports <= 11


@pytest.mark.parametrize("shutdown", [0.0, 5.0])
def test_a_stall_time_of_0_never_warns(shutdown: float) -> None:
    inspector = StallInspector(0, shutdown)
    assert inspector.next_check(0.0) == (shutdown or float("inf"))
    assert inspector.inspect([Waiting("t", (1,), 0.0)], 4.9) is None
    last = inspector.inspect([Waiting("t", (1,), 0.0)], 1000.0)
    assert (last is not None and last.shutdown) == bool(shutdown)


@pytest.mark.parametrize("scalar", [0, 1])
def test_a_tensor_without_rows_fails_its_call_alone(scalar: int) -> None:
    def main(rank: int) -> None:
        tensor = np.float64(1.0) if rank == scalar else np.ones(2)
        for call in (hvd.allgather, partial(hvd.alltoall, splits=[0, 0])):
            with pytest.raises(hvd.HorovodInternalError, match="no rows; reshape it"):
                call(tensor, name="rows")
        assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [2.0]

    run_ranks(2, main)


@pytest.mark.parametrize("hosts", [None, [[0], [1]]])
def test_a_root_is_any_whole_number(hosts: Any) -> None:
    def main(rank: int) -> None:
        for root in (1, np.int64(1), np.argmax([0, 1])):
            assert hvd.broadcast(np.full(2, rank), root, name="b").tolist() == [1, 1]
        for wrong in (1.0, 0.0, "0", None):
            with pytest.raises(ValueError, match="invalid root rank"):
                hvd.broadcast(np.full(2, rank), wrong, name="b")

    run_ranks(2, main, hosts=hosts)


def test_a_factor_counts_as_it_is_at_the_call() -> None:
    def main(rank: int) -> None:
        factor = np.array(1.0)
        for value in (1.0, 0.25):
            factor.fill(value)
            for name in ("named", None):
                found = hvd.allreduce(np.ones(1), op=hvd.Sum, prescale_factor=factor, name=name)
                assert found.tolist() == [2 * value]

    run_ranks(2, main)
