"""Process groups of ranks that are threads, used as torch.distributed uses them."""

from __future__ import annotations

import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.common.runtime.current import current
from hvdlite.common.runtime.process_sets import global_process_set
from hvdlite.torch.process_group import rendezvous
from hvdlite.torch.process_group.calls import Caller
from hvdlite.torch.process_group.group import HvdliteProcessGroup
from tests.ranks import run_ranks

MINUTE = timedelta(minutes=1)


def group_of_all(timeout: timedelta = MINUTE) -> Any:
    """Return the group of all ranks, as `create` makes it."""
    runtime = current()
    caller = Caller(runtime, global_process_set, range(runtime.topology.size), timeout)
    caller.be_called("0")
    return HvdliteProcessGroup(caller, runtime.rank, None)


def row(*sizes: int) -> list[torch.Tensor]:
    return [torch.full((size,), float(size)) for size in sizes]


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        (([1, 3], [3, 1]), ("rank 0 has parts of [1, 3] elements", "parts of [3, 1] elements")),
        (([2, 2], [3, 1]), ("rank 0 has reducescatter", "parts of [3, 1] elements")),
    ],
)
def test_reduce_scatter_of_parts_that_differ(
    cuts: tuple[list[int], list[int]], words: tuple[str, str]
) -> None:
    """The total is the same, so only the sizes of the parts tell."""

    def main(rank: int) -> None:
        group = group_of_all()
        own = cuts[rank]
        with pytest.raises(hvd.HorovodInternalError) as error:
            group.reduce_scatter(torch.empty(own[rank]), row(*own)).wait()
        assert all(word in str(error.value) for word in words), error.value
        output = torch.empty(1 + 2 * rank)
        group.reduce_scatter(output, row(1, 3)).wait()
        assert output.tolist() == [2.0 + 4 * rank] * (1 + 2 * rank)

    run_ranks(2, main)


def test_a_rank_that_makes_no_group() -> None:
    def main(rank: int) -> None:
        if rank == 0:
            with pytest.raises(hvd.HorovodInternalError, match=r"not called it after 0.05 s"):
                rendezvous._shared_store(current(), timedelta(seconds=0.05))
        hvd.barrier()

    run_ranks(2, main)


def test_calls_after_a_coalescing_that_an_exception_has_left() -> None:
    """torch calls nothing then: what is waited for later goes, and the next coalescing is whole."""

    def main(rank: int) -> None:
        group, cpu = group_of_all(), torch.device("cpu")
        group._start_coalescing(cpu)
        group.allreduce(torch.ones(1))
        alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        for _ in range(5):
            later = torch.ones(2)
            alive.add(later)
            group.allreduce(later).wait()
        del later
        until = time.monotonic() + 10
        while len(alive) > 1 and time.monotonic() < until:
            time.sleep(0.001)
        assert len(alive) <= 1  # The engine's thread may hold the last one until the next comes.
        group._start_coalescing(cpu)
        own = [torch.full((1,), float(rank)) for _ in range(3)]
        works = [group.allreduce(tensor) for tensor in own]
        works[0].wait()
        together = group._end_coalescing(cpu)
        together.wait()
        assert [tensor.item() for tensor in own] == [1.0] * 3
        assert [work.is_completed() for work in works] == [True] * 3
        assert all(output in own for output in together.result())
        group._start_coalescing(cpu)
        group.allreduce(torch.ones(1))
        group.shutdown()
        assert not group._coalesced

    run_ranks(2, main)


def test_abort_ends_what_waits_at_once() -> None:
    """Rank 1 does not come before; the collective itself goes on, so that it can."""

    def main(rank: int) -> None:
        group = group_of_all(timedelta(hours=1))
        tensor = torch.ones(1)
        if rank == 1:
            hvd.barrier()
            group.allreduce(tensor).wait()
            hvd.barrier()
            return
        work = group.allreduce(tensor)
        errors: list[Exception] = []

        def wait() -> None:
            try:
                work.wait()
            except hvd.HorovodInternalError as error:
                errors.append(error)

        failed = threading.Event()
        future = work.get_future()
        future.add_done_callback(lambda _: failed.set())
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        group.abort()
        waiting.join(10)
        text = "'pg.0.allreduce.0' was aborted on this rank"
        assert [text in str(error) for error in errors] == [True]
        assert failed.wait(10)
        with pytest.raises(RuntimeError, match=text):
            future.wait()
        assert work.is_completed() and not work.is_success() and text in str(work.exception())
        with pytest.raises(hvd.HorovodInternalError, match=text):
            work.wait()
        with pytest.raises(ValueError, match=r"abort\(\): call .*destroy_process_group"):
            group.allreduce(tensor)
        hvd.barrier()
        hvd.barrier()

    run_ranks(2, main)


def test_rank_0_keeps_the_store_until_all_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come later would try to connect for minutes."""
    through, connect = threading.Event(), rendezvous._connect

    def connect_late(runtime: Any, offer: Any) -> Any:
        assert not through.wait(0.1)  # Unless it waits, rank 0 has all that it needs.
        return connect(runtime, offer)

    monkeypatch.setattr(rendezvous, "_connect", connect_late)

    def main(rank: int) -> None:
        rendezvous._new_store(current())
        if rank == 0:
            through.set()

    run_ranks(2, main)


def test_both_names_of_torch() -> None:
    """Torch 2.13 has new names of some methods, and some of its callers have the old ones."""

    def main(rank: int) -> None:
        group = group_of_all()
        mine, whole = torch.full((2,), rank + 1.0), torch.arange(4.0)
        for name in ("all_gather_single", "_allgather_base"):
            getattr(group, name)(output := torch.empty(4), mine).wait()
            assert output.tolist() == [1.0, 1.0, 2.0, 2.0], name
        for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"):
            getattr(group, name)([output := torch.empty(4)], [mine]).wait()
            assert output.tolist() == [1.0, 1.0, 2.0, 2.0], name
        for name in ("reduce_scatter_single", "_reduce_scatter_base"):
            getattr(group, name)(output := torch.empty(2), whole).wait()
            assert output.tolist() == [4.0 * rank, 4.0 * rank + 2], name
        for name in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"):
            getattr(group, name)([output := torch.empty(2)], [whole]).wait()
            assert output.tolist() == [4.0 * rank, 4.0 * rank + 2], name
        for name in ("all_to_all_single", "alltoall_base"):
            getattr(group, name)(output := torch.empty(2), mine, [], []).wait()
            assert output.tolist() == [1.0, 2.0], name

    run_ranks(2, main)


@pytest.mark.parametrize("hosts", [None, [[0], [1, 2, 3]]])
def test_recv_from_any_rank_while_others_compute(hosts: list[list[int]] | None) -> None:
    """Leaders of hosts pass on who has sent, also of messages inside their host."""

    def main(rank: int) -> None:
        group = group_of_all()
        if rank == 1:
            seen = []
            for _ in range(6):
                tensor = torch.empty(1)
                work = group.recv_anysource([tensor])
                work.wait()
                assert work._source_rank() == tensor.item()
                seen.append(work._source_rank())
            assert sorted(seen) == [0, 0, 2, 2, 3, 3]
        else:
            for _ in range(2):
                group.send([torch.tensor([float(rank)])], 1).wait()
        group.barrier().wait()

    run_ranks(4, main, hosts=hosts)


def test_recv_from_any_rank_of_ranks_that_have_left() -> None:
    def main(rank: int) -> None:
        if rank == 0:
            work = group_of_all().recv_anysource([torch.empty(1)])
            with pytest.raises(hvd.HorovodInternalError, match="has been shut down"):
                work.wait()
            assert work.is_completed() and not work.is_success()

    run_ranks(3, main)
