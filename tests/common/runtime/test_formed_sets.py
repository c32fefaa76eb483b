"""Process sets that their members form alone, while the other ranks do something else."""

from __future__ import annotations

import gc
import random
import re
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.gradients.segment_plan import chosen, set_split_strategy_by_size
from hvdlite.common.requests.process_set_table import ProcessSetTable
from hvdlite.common.runtime.current import current, use
from hvdlite.common.runtime.formed_sets import form_process_set, release_process_set
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.settings.config import Config
from tests.common.watching import watching
from tests.limits import HANG_SECONDS
from tests.ranks import run_ranks, run_threads
from tests.short_calls import until

pytestmark = pytest.mark.timeout(120)

HOSTS = [None, [[0, 1], [2, 3]], [[0], [1, 2, 3]]]
QUIET = Config(stall_check_disable=True)


def total(process_set: ProcessSet, name: str = "x") -> float:
    """The sum of the ranks of a set, plus one for each."""
    rank = current().rank
    result = hvd.allreduce(np.ones(3) + rank, op=hvd.Sum, process_set=process_set, name=name)
    assert result.min() == result.max()
    return float(result[0])


def sets_of_this_rank() -> dict[int, list[int]]:
    """All sets that this rank knows, by their ids."""
    return current().engine.process_sets.all()


@pytest.mark.parametrize("hosts", HOSTS)
def test_members_form_a_set_while_the_others_wait_in_a_collective(hosts: Any) -> None:
    def main(rank: int) -> Any:
        if rank in (1, 2):
            formed = form_process_set([2, 1])
            assert (formed.ranks, formed.rank(), formed.size()) == ([1, 2], rank - 1, 2)
            assert total(formed) == 5
            release_process_set(formed)
            assert formed.process_set_id is None
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="all").tolist() == [4]
        hvd.barrier()
        return sets_of_this_rank()

    assert run_ranks(4, main, hosts=hosts) == [{0: [0, 1, 2, 3]}] * 4


@pytest.mark.parametrize("hosts", HOSTS)
def test_members_form_a_set_while_another_rank_has_joined(hosts: Any) -> None:
    def main(rank: int) -> Any:
        if rank != 3:
            until(lambda: rank != 0 or current().engine._control_plane._coordinator._sets[0].join)
            hvd.allreduce(np.ones(1), name="after the join of rank 3")
            formed = form_process_set([0, 1, 2])
            assert total(formed) == 6
        hvd.join()
        later = form_process_set(range(3)) if rank != 3 else None
        hvd.barrier()
        return sets_of_this_rank(), later and later.process_set_id

    sets = {0: [0, 1, 2, 3], 1: [0, 1, 2]}
    assert run_ranks(4, main, hosts=hosts) == [(sets, 1)] * 3 + [(sets, None)]


@pytest.mark.parametrize("hosts", HOSTS)
def test_ids_stay_alike_on_all_ranks_through_random_programs(hosts: Any) -> None:
    """Groups are made in one order on their members, and given back in any."""
    plan = random.Random(5)
    groups = [sorted(plan.sample(range(4), plan.randint(1, 4))) for _ in range(40)]

    def main(rank: int) -> Any:
        order, held = random.Random(rank), []
        for number, group in enumerate(groups):
            if rank not in group:
                continue
            formed = form_process_set(group)
            assert total(formed, f"group {number}") == sum(group) + len(group)
            held.append(formed)
            if order.random() < 0.7:
                release_process_set(held.pop(order.randrange(len(held))))
            if number % 10 == 9 and rank == group[0]:
                assert formed.process_set_id in sets_of_this_rank() or formed not in held
        hvd.barrier()
        kept = sets_of_this_rank()
        hvd.barrier()
        for formed in held:
            release_process_set(formed)
        last = hvd.add_process_set([0, 3])  # an answer after those to all releases, on any host
        hvd.barrier()
        until(lambda: len(sets_of_this_rank()) == 2)
        return kept, last.process_set_id

    results = run_ranks(4, main, hosts=hosts)
    assert results == [results[0]] * 4


def test_sets_of_the_same_ranks_are_one_until_the_last_release() -> None:
    def main(rank: int) -> None:
        if rank < 2:
            first, second = form_process_set([0, 1]), form_process_set([1, 0])
            assert first is not second
            assert first.process_set_id == second.process_set_id == 1
            assert hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=first).tolist() == [2]
            release_process_set(first if rank else second)  # any of them
            rest = second if rank else first
            assert hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=rest).tolist() == [2]
            with pytest.raises(ValueError, match="released already"):
                release_process_set(first if rank else second)
            with pytest.raises(ValueError, match="not registered"):
                hvd.allreduce(np.ones(1), process_set=first if rank else second)
            third = form_process_set([0, 1])
            assert total(third) == 3
            release_process_set(rest)
            release_process_set(third)
        until(lambda: sets_of_this_rank() == {0: [0, 1, 2]})
        hvd.barrier()

    run_ranks(3, main)


def test_a_release_waits_for_nobody_and_ends_when_the_last_member_has_made_it() -> None:
    def main(rank: int) -> None:
        formed = form_process_set([0, 1]) if rank < 2 else None
        if rank == 0:
            release_process_set(formed)
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="all").tolist() == [3]
        if rank == 0:  # far longer than the time after which a tensor is reported
            threading.Event().wait(0.1)
        assert 1 in sets_of_this_rank()
        hvd.barrier()
        if rank == 1:
            release_process_set(formed)
        until(lambda: 1 not in sets_of_this_rank())
        hvd.barrier()

    with watching("stalled") as log:
        run_ranks(3, main, config=Config(stall_warning_seconds=0.01))
    assert "release_process_set" not in log.text


@pytest.mark.parametrize("formed_first", [True, False])
def test_a_set_can_be_added_by_all_ranks_as_well(formed_first: bool) -> None:
    """Each way to make it keeps it until it is undone."""

    def main(rank: int) -> None:
        formed = form_process_set([0, 1]) if rank < 2 and formed_first else None
        hvd.barrier()
        added = hvd.add_process_set([0, 1])
        with pytest.raises(ValueError, match="duplicate"):
            hvd.add_process_set([0, 1])
        if rank < 2 and not formed_first:
            formed = form_process_set([0, 1])
        assert added.process_set_id == 1
        if formed is not None:
            assert formed.process_set_id == 1
            assert not hvd.remove_process_set(ProcessSet([0, 1]))
        if formed_first:
            assert hvd.remove_process_set(added)
            if formed is not None:
                assert not hvd.remove_process_set(formed)  # it is not the ranks' own
                assert total(formed) == 3
                release_process_set(formed)
        else:
            if formed is not None:
                release_process_set(formed)
            hvd.barrier()
            if rank < 2:
                assert total(added) == 3
            assert hvd.remove_process_set(added)
        until(lambda: list(sets_of_this_rank()) == [0])
        hvd.barrier()

    run_ranks(3, main)


def test_what_is_wrong_at_the_call() -> None:
    def main(rank: int) -> None:
        for ranks, words in (
            ([1], "formed by its members alone, and rank 0 is none of them"),
            ([0, 0], "names a rank twice"),
            ([], "at least one rank"),
            ([0, 2], "rank 2 does not exist"),
            ("01", "list of ranks"),
        ):
            with pytest.raises(ValueError, match=words):
                form_process_set(ranks)
        with pytest.raises(ValueError, match="was not formed"):
            release_process_set(hvd.global_process_set)

    run_ranks(2, lambda rank: main(rank) if rank == 0 else None)


@pytest.mark.parametrize("hosts", HOSTS)
def test_members_that_name_different_ranks_are_named_by_the_stall_report(hosts: Any) -> None:
    def main(rank: int) -> None:
        ranks = {0: [0, 1, 2], 1: [0, 1], 2: [0, 1, 2]}.get(rank)
        with pytest.raises(hvd.HorovodInternalError, match="stalled"):
            if ranks is None:
                hvd.allreduce(np.ones(1), name="all")
            else:
                form_process_set(ranks)

    with watching("stalled") as log:
        limits = Config(stall_warning_seconds=0.3, stall_shutdown_seconds=1.2)
        run_ranks(4, main, hosts=hosts, config=limits)
    # The allreduce that rank 3 waits for is named before them where one report names all three.
    for rank, ranks in ((1, "[0, 1, 2]"), (0, "[0, 1]")):
        said = f"Rank {rank} has not submitted: (.*, )?{re.escape(f'form_process_set.{ranks}')}[.,]"
        assert re.search(said, log.text)


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("joins_first", [True, False])
def test_a_member_that_has_joined_is_named(hosts: Any, joins_first: bool) -> None:
    """Nobody can wait for it: its join ends when the others have joined."""
    asked = threading.Event()

    def main(rank: int) -> None:
        runtime = current()
        if rank == 3:
            if not joins_first:
                until(asked.is_set)
            hvd.join()
            return
        if rank == 0:
            coordinator = runtime.engine._control_plane._coordinator
            if joins_first:
                until(lambda: coordinator._sets[0].join)
            else:
                threading.Thread(
                    target=lambda: (
                        until(lambda: any(True for _ in coordinator._sets[0].waiting())),
                        asked.set(),
                    ),
                    daemon=True,
                ).start()
            with pytest.raises(hvd.HorovodInternalError, match=r"rank 3 has called join\(\)"):
                form_process_set([0, 3])
        hvd.join()

    run_ranks(4, main, hosts=hosts, config=QUIET)


@pytest.mark.parametrize("hosts", HOSTS)
def test_the_ranks_that_stay_go_on_when_another_one_has_shut_down(hosts: Any) -> None:
    gone = threading.Event()

    def main(rank: int) -> None:
        kept = form_process_set([0, 1, 2, 3])
        pair = form_process_set([rank // 2 * 2, rank // 2 * 2 + 1])
        assert total(pair) == 2 * (rank // 2 * 2) + 3
        if rank == 3:
            current().shutdown()
            gone.set()
            assert kept.process_set_id is pair.process_set_id is None
            return
        assert gone.wait(30)
        with pytest.raises(hvd.HorovodInternalError, match="rank 3 has been shut down"):
            form_process_set([rank, 3])
        rest = form_process_set([0, 1, 2])
        assert total(rest) == 6
        release_process_set(kept)  # the rank that is gone cannot release it
        release_process_set(pair)
        assert total(rest) == 6
        known = current().engine.process_sets
        until(lambda: known.id_of((0, 1, 2, 3)) == 0 and known.id_of((0, 1)) is None)
        until(lambda: known.id_of((2, 3)) is None)

    run_ranks(4, main, hosts=hosts, config=QUIET)


def test_threads_of_a_rank_form_sets_at_the_same_time() -> None:
    def main(rank: int) -> None:
        runtime = current()

        def thread(number: int) -> None:
            other = (rank + 1 + number % 2) % 3
            with use(runtime):
                for step in range(10):
                    formed = form_process_set([rank, other])
                    name = f"{min(rank, other)}{max(rank, other)} {step}"
                    assert total(formed, name) == rank + other + 2
                    release_process_set(formed)

        run_threads(2, thread)
        hvd.barrier()

    run_ranks(3, main)


def test_threads_that_form_the_same_set() -> None:
    def main(rank: int) -> None:
        runtime = current()

        def thread(number: int) -> None:
            with use(runtime):
                formed = form_process_set([0, 1])
                assert total(formed, f"thread {number}") == 3
                release_process_set(formed)

        if rank < 2:
            run_threads(4, thread)
        until(lambda: list(sets_of_this_rank()) == [0])
        hvd.barrier()

    run_ranks(3, main)


@pytest.mark.thorough
def test_a_hundred_sets_leave_nothing_behind() -> None:
    """No memory, no ids, no threads."""
    size = 4
    groups = [[r for r in range(size) if mask >> r & 1] for mask in range(1, 1 << size)]

    def round_(rank: int) -> None:
        for number, group in enumerate(groups):
            if rank in group:
                formed = form_process_set(group)
                total(formed, f"x{number}")
                release_process_set(formed)
        hvd.barrier()
        until(lambda: list(sets_of_this_rank()) == [0])
        hvd.barrier()

    def main(rank: int) -> Any:
        for _ in range(4):
            round_(rank)
        if rank == 0:
            gc.collect()
            tracemalloc.start()
        hvd.barrier()
        threads, before = threading.active_count(), tracemalloc.get_traced_memory()[0]
        for _ in range(7):
            round_(rank)
        hvd.barrier()
        grown = 0
        if rank == 0:
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
        hvd.barrier()
        ids = form_process_set([rank]).process_set_id
        return threading.active_count() - threads, grown, ids

    # Without short calls, which keep the last 500 names, such as those of barriers.
    for more_threads, grown, process_set_id in run_ranks(size, main, config=Config(native="off")):
        assert more_threads <= 0
        assert grown < 60_000
        assert process_set_id <= len(groups)


def test_ids_are_used_again_and_uses_are_counted() -> None:
    table = ProcessSetTable(4)
    assert table.form((0, 1)) == (1, 1, True)
    assert table.form((0, 1)) == (1, 2, False)
    assert table.form((0, 1, 2, 3)) == (0, 1, False)
    assert not table.release(0)
    assert not table.release(1)
    assert table.add((0, 1)) == 1
    assert not table.release(1)
    assert table.remove(1)
    assert table.all() == {0: [0, 1, 2, 3]}
    assert table.form((2,)) == (1, 1, True)
    assert table.added() == []
    assert not table.is_added(1)


def test_a_member_that_does_not_come_in_time() -> None:
    """The set can be formed afterwards, and ends with the last of those that have it."""

    def main(rank: int) -> None:
        if rank == 0:
            words = r"\[0, 1\] was not formed after 0.05 s"
            with pytest.raises(hvd.HorovodInternalError, match=words):
                form_process_set([0, 1], timeout_seconds=0.05)
        hvd.barrier()
        if rank == 1:  # It meets the request that rank 0 no longer waits for.
            release_process_set(form_process_set([0, 1], timeout_seconds=60))
        hvd.barrier()
        formed = form_process_set([0, 1], timeout_seconds=60)
        assert total(formed) == 3
        release_process_set(formed)

    run_ranks(2, main)


def test_who_gave_up_may_call_again_before_the_others_come() -> None:
    asked = threading.Event()

    def main(rank: int) -> None:
        if rank == 0:
            for _ in range(3):
                with pytest.raises(hvd.HorovodInternalError, match="was not formed"):
                    form_process_set([0, 1], timeout_seconds=0.05)
            asked.set()
        assert asked.wait(HANG_SECONDS)
        formed = form_process_set([0, 1], timeout_seconds=60)
        assert total(formed) == 3
        release_process_set(formed)
        hvd.barrier()
        assert current().engine.process_sets.all() == {0: [0, 1]}

    run_ranks(2, main)


def test_a_new_set_has_not_the_segmentation_of_the_last_one_with_its_id() -> None:
    def main(rank: int) -> None:
        if rank < 2:
            first = form_process_set([0, 1])
            set_split_strategy_by_size([30, 70], first)
            release_process_set(first)
        until(lambda: list(sets_of_this_rank()) == [0])
        hvd.barrier()
        if rank > 0:
            second = form_process_set([1, 2])
            assert second.process_set_id == 1
            assert chosen(second) == chosen(hvd.global_process_set)

    run_ranks(3, main)
